"""The dims of foreign programs: which of them are the same, read from their StableHLO."""
