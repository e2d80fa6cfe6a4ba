"""Recipes: configurations for public corpora, and commands that make corpora from their sources."""
