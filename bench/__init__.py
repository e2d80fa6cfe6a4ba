"""Benchmarks: ratios to the machine's own limits, measured side by side in one run."""
