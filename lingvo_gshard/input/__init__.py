"""From prepared records to packed batches."""
