"""Files: atomic writes, digests, buckets, JSON records, safetensors, and tables of text."""
