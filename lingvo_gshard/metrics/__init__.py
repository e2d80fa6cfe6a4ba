"""BLEU."""
