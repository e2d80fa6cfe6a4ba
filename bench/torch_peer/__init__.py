"""The benchmarks' peer: a plain PyTorch MoE Transformer with the same mathematics.

Its modules do not import lingvo_gshard. They run in a separate virtual environment.
"""
