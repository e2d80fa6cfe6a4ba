"""Corpora that are made from public sources."""
