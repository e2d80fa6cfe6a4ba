"""Memory, roofline, categories and collectives of a compiled program."""
