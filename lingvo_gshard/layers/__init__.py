"""The layers of the MoE Transformer, one a file."""
