"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX.

The compilation cache is off, so that each test compiles its own programs.
"""

import os

from lingvo_gshard.spmd import environment

# Most of the quick tests' time is compilation: XLA plans and partitions the programs as always,
# but spends a third of the time on their machine code. The slow tests have XLA's defaults.
_QUICK_MACHINE_CODE = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")

os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
environment.prepare(num_devices=8)


def pytest_configure(config):
    """Prepares XLA for the tests that are chosen."""
    if config.option.markexpr == "not slow":
        os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *_QUICK_MACHINE_CODE])
