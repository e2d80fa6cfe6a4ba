"""Repairs of operators that XLA's partitioner computes wrongly, mostly on uneven parts."""
