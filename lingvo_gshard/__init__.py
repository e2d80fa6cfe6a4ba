"""GShard on XLA's SPMD partitioner: annotated layers, MoE Transformers, flat beam search."""
