"""Experiments on the quality of translations, which train for hours."""
