"""One plan: making, keeping and showing it."""
