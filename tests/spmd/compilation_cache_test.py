"""The second process does not compile, and computes bit for bit the same."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from lingvo_gshard.spmd import lowering
from tests.spmd import functions

_RUN_SAVED = """
import collections, json, sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=4)
import numpy as np
from jax import monitoring
counts = collections.Counter()
monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import program
from lingvo_gshard.spmd.executable import compile_program
data = np.load(sys.argv[2])
weights = NestedMap(wi_MH=data["wi_MH"], wo_HV=data["wo_HV"])
executable = compile_program(program.load(sys.argv[1]))
batch = NestedMap(x_BM=data["x_BM"], y_BV=data["y_BV"])
for _ in range(3):
    result = executable(weights, batch)
    weights = result.weights
report = executable.report() if "report" in sys.argv else None  # Needs TensorFlow.
leaves = [np.asarray(leaf).tobytes().hex() for leaf in result.Flatten()]
print(json.dumps(dict(counts=counts, leaves=leaves, report=repr(report))))
"""

# An MoE layer and its gradient, which are traced, exported and compiled anew.
_START = """
import collections, json
from xla_spmd.runtime import environment
environment.prepare(num_devices=2)
from jax import monitoring
counts = collections.Counter()
monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.executable import compile_program
from repro.tables import moe_layer
annotated = moe_layer.forward_and_backward(2, moe_layer.Sizes(8, 12, 16, 2))
compile_program(lowering.export(annotated, moe_layer.partitioning(2)))
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Saves a program and its arrays."""
    folder, fn = tmp_path_factory.mktemp("saved"), functions.sgd_step()
    lowering.export(fn, functions.partitioning(4)).save(folder / "sgd.program")
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    np.savez(folder / "in.npz", **weights, **batch)
    return [str(folder / "sgd.program"), str(folder / "in.npz")]


def _run(files: list[str], code: str = _RUN_SAVED, **env: str) -> dict:
    keep = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    command = [sys.executable, "-c", code, *files]
    run = subprocess.run(command, env={**keep, **env}, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.mark.slow
def test_the_second_process_compiles_nothing(files, tmp_path):
    first = _run([*files, "report"], HOME=str(tmp_path))
    (folder,) = (tmp_path / ".cache" / "lingvo_gshard").iterdir()
    assert first["counts"]["cache_misses"] == first["counts"]["compile_requests_use_cache"] >= 1
    assert len(list(folder.glob("*-cache"))) == first["counts"]["cache_misses"]
    second = _run([*files, "report"], HOME=str(tmp_path))
    assert second["counts"]["cache_hits"] == first["counts"]["cache_misses"]
    assert second["counts"]["compile_requests_use_cache"] == second["counts"]["cache_hits"]
    assert "cache_misses" not in second["counts"]
    assert (second["leaves"], second["report"]) == (first["leaves"], first["report"])
    for entry in folder.glob("*-cache"):
        entry.write_bytes(b"damaged")
    assert _run(files, HOME=str(tmp_path))["leaves"] == first["leaves"]


@pytest.mark.slow
def test_a_layer_that_is_traced_anew_is_not_compiled_anew(tmp_path):
    first, second = (_run([], _START, HOME=str(tmp_path)) for _ in range(2))
    assert first["cache_misses"] == first["compile_requests_use_cache"] >= 1
    assert second["cache_hits"] == second["compile_requests_use_cache"] == first["cache_misses"]
    assert "cache_misses" not in second


@pytest.mark.slow
def test_off_and_elsewhere(files, tmp_path):
    variable = "LINGVO_GSHARD_COMPILATION_CACHE"
    off = _run(files, HOME=str(tmp_path / "home"), **{variable: "off"})
    assert not {"cache_hits", "cache_misses"} & off["counts"].keys()
    assert not (tmp_path / "home" / ".cache" / "lingvo_gshard").exists()
    other = _run(files, HOME=str(tmp_path / "home"), **{variable: str(tmp_path / "other")})
    assert len(list((tmp_path / "other").glob("*/*-cache"))) == other["counts"]["cache_misses"]
    jaxs = _run(files, HOME=str(tmp_path / "home"), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert len(list((tmp_path / "own").glob("*-cache"))) == jaxs["counts"]["cache_misses"]
    assert not (tmp_path / "home" / ".cache" / "lingvo_gshard").exists()
    assert off["leaves"] == other["leaves"] == jaxs["leaves"]
