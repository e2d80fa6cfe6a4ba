"""Parallel text as it is found: files of several formats, and TensorFlow Datasets."""
