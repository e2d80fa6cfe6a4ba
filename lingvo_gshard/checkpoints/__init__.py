"""Checkpoints of a partitioned state: saving, restoring, exporting, warm starts."""
