"""Runs: their record, the trainer's modes, pruning, and the bundles and SavedModels of decoders."""
