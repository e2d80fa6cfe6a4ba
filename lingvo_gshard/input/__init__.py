"""Reads prepared records and makes packed batches of them."""
