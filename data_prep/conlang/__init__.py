"""Constructed languages: meanings, an English grammar, and fourteen languages of four families."""
