"""The peer that the benchmark runs beside: a plain PyTorch MoE Transformer of the same mathematics.

It imports nothing of lingvo_gshard, and runs in a virtual environment of its own.
"""
