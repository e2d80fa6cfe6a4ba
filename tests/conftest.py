"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX.

The compilation cache is off, so that each test compiles its own programs.
"""

import ctypes
import gc
import importlib
import os
import sys

import pytest

from lingvo_gshard.spmd import environment
from tests import quick_machine_code

os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
environment.prepare(num_devices=8)


def pytest_configure(config):
    """Most of the quick tests' time is compilation; the slow ones have XLA's defaults."""
    if config.option.markexpr == "not slow":
        os.environ["XLA_FLAGS"] += f" {quick_machine_code.FLAGS}"


@pytest.fixture(scope="module", autouse=True)
def _memory_is_returned(request):
    """After each file of slow tests, the kernel gets back what its compilations needed."""
    yield
    if request.config.option.markexpr == "not slow":
        return
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc has it.
        libc.malloc_trim(0)


@pytest.fixture
def compiled(monkeypatch):
    """Counts what is compiled: one entry for each."""
    jax = importlib.import_module("jax")
    calls, compile_lowered = [], jax.stages.Lowered.compile

    def count(self, *args, **kwargs):
        calls.append(self)
        return compile_lowered(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", count)
    return calls
