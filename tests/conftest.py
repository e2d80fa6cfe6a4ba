"""Eight virtual CPU devices for every test, set before anything loads TensorFlow or JAX.

The compilation cache is off, so that each test compiles its own programs. Progress is hidden,
because the tests compare a program's messages, and a slow machine shows more of it.
"""

import ctypes
import gc
import importlib
import os
import sys

import pytest

from tests import quick_machine_code
from xla_spmd.runtime import environment

os.environ["LINGVO_GSHARD_COMPILATION_CACHE"] = "off"
os.environ["LINGVO_GSHARD_PROGRESS"] = "off"
environment.prepare(num_devices=8)
os.environ["XLA_FLAGS"] += f" {quick_machine_code.FLAGS}"


@pytest.fixture(autouse=True)
def _memory_is_returned(request):
    """Returns the memory of graphs and compilations to the kernel after a slow test."""
    yield
    if request.node.get_closest_marker("slow") is None or "jax" not in sys.modules:
        return
    _forget_graphs()
    sys.modules["jax"].clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc has it.
        libc.malloc_trim(0)


def _forget_graphs():
    """Drops JAX's and TensorFlow's own references to the graphs of all functions so far."""
    if call_tf := sys.modules.get("jax.experimental.jax2tf.call_tf"):
        call_tf._get_concrete_function_tf.cache_clear()
    if ops := sys.modules.get("tensorflow.python.framework.ops"):
        gradients = ops.gradient_registry._registry
        for name in [name for name in gradients if name.startswith("CustomGradient-")]:
            del gradients[name]


@pytest.fixture
def compiled(monkeypatch):
    """Yields a list with an entry for each compilation."""
    jax = importlib.import_module("jax")
    calls, compile_lowered = [], jax.stages.Lowered.compile

    def count(self, *args, **kwargs):
        calls.append(self)
        return compile_lowered(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", count)
    return calls
