"""XLA flags for the tests, whose time is compilation: its CPU backend works a third as long.

XLA plans and partitions the programs as always, but hardly optimizes their machine code. Programs
that tests start inherit the flags.
"""

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
