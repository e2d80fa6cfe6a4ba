"""The benchmarks' peer: a plain PyTorch MoE Transformer with the same mathematics.

Its modules use nothing from lingvo_gshard. They run in a virtual environment of their own.
"""
