"""Repairs of operators that XLA's partitioner computes wrongly on uneven parts."""
