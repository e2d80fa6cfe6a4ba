"""Params, trees of tensors, and the base of all layers."""
