"""Files that a program leaves whole: atomic writes, digests, buckets, safetensors, tables."""
