"""Training steps that others measured and published, beside our plans of them."""
