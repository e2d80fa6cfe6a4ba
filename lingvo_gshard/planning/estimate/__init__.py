"""Estimates without a compiler: figures of machines, networks, a cost model and its candidates."""
