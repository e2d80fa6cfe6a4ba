"""Topologies, rates by dtype, memories, and networks of machines that are not at hand."""
