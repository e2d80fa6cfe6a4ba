"""Decoding: flat beam search, translation of text, and bundles."""
