"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX.

The compilation cache is off, so that each test compiles its own programs.
"""

import ctypes
import gc
import os
import sys

import pytest

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


@pytest.fixture(scope="module", autouse=True)
def _memory_is_returned():
    """After each file, the kernel gets back what its compilations needed: workers share memory."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc has it.
        libc.malloc_trim(0)
