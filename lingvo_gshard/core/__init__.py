"""Params and layers, and the files, digests, buckets and tables that all rooms use."""
