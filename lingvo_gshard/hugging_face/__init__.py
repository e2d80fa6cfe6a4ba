"""Models in Hugging Face's format: what their files mean, and how they are read and written."""
