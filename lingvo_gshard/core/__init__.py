"""Params, NestedMap and BaseLayer."""
