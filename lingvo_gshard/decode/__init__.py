"""Flat beam search."""
