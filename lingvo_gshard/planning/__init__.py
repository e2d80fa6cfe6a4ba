"""Planning for machines not at hand: memory, roofline, search, and the tables of the paper."""
