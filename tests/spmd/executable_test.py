"""Calling a compiled program: donation, placement, and its errors."""

import jax
import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions


@pytest.fixture(scope="module")
def executable():
    return compile_program(lowering.export(functions.sgd_step(), functions.partitioning(4)))


def _args(executable) -> list[NestedMap]:
    return [functions.randoms(arg, seed) for seed, arg in enumerate(executable.program.args)]


def test_donated_arrays_are_deleted_and_the_others_kept(executable):
    weights, batch = _args(executable)
    placed = executable.place("weights", weights)
    kept = executable.place("batch", batch)
    executable(placed, kept)
    assert all(leaf.is_deleted() for leaf in placed.Flatten())
    assert not any(leaf.is_deleted() for leaf in kept.Flatten())
    assert executable.report().alias_bytes == sum(leaf.nbytes for leaf in weights.Flatten())


def test_the_callers_numpy_arrays_are_untouched(executable):
    weights, batch = _args(executable)
    before = weights.Transform(np.copy)
    executable(weights, batch)
    for a, b in zip(weights.Flatten(), before.Flatten(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_result_feeds_the_next_call(executable):
    weights, batch = _args(executable)
    losses = []
    for _ in range(20):
        result = executable(weights, batch)
        weights = result.weights
        losses.append(float(result.loss))
    assert losses[-1] < 0.8 * losses[0]


def test_an_array_placed_otherwise_is_moved(executable):
    weights, batch = _args(executable)
    want = executable(weights, batch)
    moved = batch.Transform(lambda leaf: jax.device_put(leaf, jax.devices()[5]))
    np.testing.assert_array_equal(executable(weights, moved).loss, want.loss)


def test_shardings_are_the_tables(executable):
    weights, batch = _args(executable)
    x_BM = executable.place("batch", batch).x_BM
    assert x_BM.sharding.shard_shape(x_BM.shape) == (4, 5)
    assert executable.place("weights", weights).wi_MH.is_fully_replicated
    with pytest.raises(ValueError, match="no argument 'state', only weights, batch"):
        executable.place("state", weights)


def test_a_wrong_shape_names_the_path(executable):
    weights, batch = _args(executable)
    batch.x_BM = batch.x_BM[:8]
    message = r"argument batch.x_BM: float32\[8, 5\] given, float32\[16, 5\] expected"
    with pytest.raises(ValueError, match=message):
        executable(weights, batch)
    with pytest.raises(ValueError, match=message):
        executable.place("batch", batch)


def test_a_wrong_dtype_names_the_path(executable):
    weights, batch = _args(executable)
    weights.wo_HV = weights.wo_HV.astype(np.float64)
    with pytest.raises(ValueError, match=r"weights.wo_HV: float64\[6, 3\] given, float32"):
        executable(weights, batch)


def test_a_missing_or_unexpected_path_is_named(executable):
    weights, batch = _args(executable)
    del batch["y_BV"]
    batch.z = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"argument batch: missing \['y_BV'\], unexpected \['z'\]"):
        executable(weights, batch)


def test_the_number_of_arguments_is_checked(executable):
    with pytest.raises(ValueError, match="1 arguments given, 2 expected: weights, batch"):
        executable(_args(executable)[0])
