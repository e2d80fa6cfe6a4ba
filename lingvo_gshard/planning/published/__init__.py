"""Published training steps: their records, plans of them, and the bounds that follow."""
