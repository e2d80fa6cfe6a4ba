"""Models in Hugging Face's format: the meaning of their files, reading and writing."""
