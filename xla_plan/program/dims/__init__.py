"""The dims of programs: which of them are the same, read from their StableHLO."""
