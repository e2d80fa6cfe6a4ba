"""Selection by index, compared with NumPy; b, n, k and P differ, so that a wrong axis fails."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.beam_search import selection
from lingvo_gshard.beam_search.selection import top_k
from lingvo_gshard.core.nested_map import NestedMap
from tests.layers import building
from tests.spmd import functions

_RNG = np.random.default_rng(0)
_INDEX_BK = _RNG.integers(0, 5, (2, 3)).astype("int32")


def test_masks_are_reordered():
    mask_BNP = _RNG.integers(0, 2, (2, 5, 7)).astype("float32")
    want = np.take_along_axis(mask_BNP, _INDEX_BK[..., None], 1)
    np.testing.assert_array_equal(selection.reordered(tf.constant(mask_BNP), _INDEX_BK), want)


def test_numbers_are_picked_and_gathered():
    x_BN = _RNG.standard_normal((2, 5)).astype("float32")
    want = np.take_along_axis(x_BN, _INDEX_BK, 1)
    np.testing.assert_array_equal(selection.picked(tf.constant(x_BN), _INDEX_BK), want)
    np.testing.assert_array_equal(selection.gathered(tf.constant(x_BN), _INDEX_BK), want)


def test_columns_are_gathered():
    x_BPN = _RNG.standard_normal((2, 7, 5)).astype("float32")
    got = selection.gathered(tf.constant(x_BPN), _INDEX_BK, axis=2)
    np.testing.assert_array_equal(got, np.take_along_axis(x_BPN, _INDEX_BK[:, None], 2))


def test_where_takes_examples_by_condition():
    new, old = (NestedMap(a=tf.fill([2], i), b=tf.fill([2, 3], i)) for i in (1, 0))
    got = selection.where(tf.constant([True, False]), new, old)
    assert got.a.numpy().tolist() == [1, 0] and got.b.numpy().tolist() == [[1] * 3, [0] * 3]


@pytest.mark.parametrize(("width", "k"), [(5, 5), (600, 1), (601, 4), (3000, 8), (700, 650)])
def test_top_k_finds_the_largest(width, k):
    """For random numbers, numbers of which half are masked, and sorted numbers."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((6, width)).astype("float32")
    x[1] = np.where(rng.random(width) < 0.5, -1e9, x[1])
    x[2:4] = np.sort(x[2:4])
    x[3] = x[3, ::-1]
    x[4] += 5 * (np.arange(width) % 7 == 3)  # The largest numbers share a few columns.
    values, index = (found.numpy() for found in top_k(tf.constant(x), k))
    np.testing.assert_array_equal(values, -np.sort(-x)[:, :k])
    np.testing.assert_array_equal(np.take_along_axis(x, index, 1), values)
    assert all(len(set(row)) == k for row in index)


def test_top_k_finds_equal_numbers_once_each():
    values, index = top_k(tf.zeros([2, 1000]), 6)
    assert not values.numpy().any() and all(len(set(row)) == 6 for row in index.numpy())
    assert index.numpy().max() < 1000


@pytest.mark.parametrize("k", [1, 3])
def test_partitioned_top_k_needs_no_communication(k):
    def fn(args):
        return NestedMap(zip(("largest", "index"), top_k(args.x, k), strict=True))

    x = np.random.default_rng(k).standard_normal((4, 600)).astype("float32")
    specs = NestedMap(x=functions.f32(x.shape, "B_"))
    run = building.compile_fn(fn, 2, {"largest": "B_", "index": "B_"}, args=specs)
    np.testing.assert_array_equal(run(NestedMap(x=x)).largest, -np.sort(-x)[:, :k])
    assert not any(count for _, count in run.report().collectives)
