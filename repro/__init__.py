"""Reproductions: the paper's tables and figures, published rates, quality experiments."""
