"""Decoding text with a trained model: bundles, lines of text, long files."""
