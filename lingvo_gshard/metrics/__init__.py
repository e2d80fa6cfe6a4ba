"""BLEU and chrF."""
