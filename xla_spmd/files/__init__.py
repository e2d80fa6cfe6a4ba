"""Atomic writes, locks, digests, buckets, JSON records, child processes, and tables of text."""
