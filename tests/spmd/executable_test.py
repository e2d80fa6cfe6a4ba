"""Calling a compiled program: donation, placement, and its errors."""

import jax
import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import lowering, processes
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.padded import PaddedArray
from tests.spmd import functions
from xla_spmd.mesh import Mesh


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


def test_an_array_with_another_placement_is_moved(executable):
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


def _thirteen_rows():
    fn = functions.sgd_step()
    fn.args[1].x_BM = functions.f32((13, 5), "BM")
    fn.args[1].y_BV = functions.f32((13, 3), "BV")
    return fn


@pytest.mark.parametrize("num_partitions", [2, 8])
@pytest.mark.parametrize("table", [{"B": "d"}, {"H": "d"}, {"B": "d", "mhv": "d"}])
def test_uneven_rows_and_weights_equal_numpy(num_partitions, table):
    """Trains on 13 rows, with weights of 5 x 6 and 6 x 3, in two steps with shared state."""
    fn = _thirteen_rows()
    letters = {letter: axis for row, axis in table.items() for letter in row}
    parts = Partitioning.from_dict(Mesh.flat(num_partitions), letters)
    executable = compile_program(lowering.export(fn, parts))

    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(fn.args))
    placed = executable.place("batch", batch)
    first = executable(weights, placed)
    wanted = functions.numpy_sgd(weights, batch)
    functions.close(first.Transform(np.asarray), wanted)

    second = executable(first.weights, placed)
    functions.close(second, functions.numpy_sgd(wanted.weights, batch))
    assert all(leaf.is_deleted() for leaf in first.weights.Flatten())


def test_padding_is_hidden_and_adds_no_communication():
    executable = compile_program(lowering.export(_thirteen_rows(), functions.partitioning(8)))
    weights, batch = _args(executable)
    placed = executable.place("batch", batch)
    hidden_BH = executable(weights, placed).hidden_BH

    # Six devices hold 2 rows, one holds 1, and the last one is empty.
    assert isinstance(hidden_BH, PaddedArray) and isinstance(placed.x_BM, PaddedArray)
    assert (hidden_BH.shape, hidden_BH.ndim, hidden_BH.padded.shape) == ((13, 6), 2, (16, 6))
    assert hidden_BH.padded.addressable_shards[0].data.shape == (2, 6)
    np.testing.assert_array_equal(placed.x_BM, batch.x_BM)
    assert not np.asarray(placed.x_BM.padded)[13:].any()
    np.testing.assert_array_equal(processes.to_host(placed).x_BM, batch.x_BM)

    # The step communicates only the gradients' sum, as with 16 rows.
    assert {kind: count for kind, count in executable.report().collectives if count} == {
        "all-reduce": 1
    }
    placed.x_BM.delete()
    assert placed.x_BM.is_deleted()


def test_an_uneven_array_of_another_layout_is_placed_anew():
    fn = _thirteen_rows()
    eight = compile_program(lowering.export(fn, functions.partitioning(8)))
    two = compile_program(lowering.export(fn, functions.partitioning(2)))
    weights, batch = _args(eight)
    want = eight(weights, batch).loss
    np.testing.assert_allclose(two(weights, eight.place("batch", batch)).loss, want, rtol=1e-6)


def test_a_padded_shape_is_not_taken_for_the_logical_one():
    executable = compile_program(lowering.export(_thirteen_rows(), functions.partitioning(8)))
    weights, batch = _args(executable)
    batch.x_BM = np.zeros((16, 5), np.float32)
    message = r"argument batch.x_BM: float32\[16, 5\] given, float32\[13, 5\] expected"
    with pytest.raises(ValueError, match=message):
        executable(weights, batch)
