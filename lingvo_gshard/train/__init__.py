"""The estimator, its loop, checkpoints and summaries."""
