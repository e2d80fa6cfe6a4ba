"""XLA flags for the tests, whose time is compilation: its CPU backend works a third as long.

XLA plans and partitions the programs as always, but hardly optimizes their machine code. Programs
that tests start inherit the flags.
"""

from xla_spmd.runtime import versions

FLAGS = " ".join(
    versions.known_xla_flags(
        {
            "--xla_backend_optimization_level": "0",
            "--xla_cpu_use_fusion_emitters": "false",
            "--xla_cpu_parallel_codegen_split_count": "1",
        }
    )
)
