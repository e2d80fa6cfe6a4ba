"""The largest numbers in two steps are those of one."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode.top_k import top_k
from tests.layers import building
from tests.spmd import functions


@pytest.mark.parametrize(
    ("width", "k"),
    [(5, 5), (40, 3), (600, 1), (601, 4), (1024, 9), (3000, 8), (4999, 2), (700, 650)],
)
def test_it_finds_the_largest(width, k):
    """Of random numbers, of some of which half are the least there is, and of sorted ones."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((6, width)).astype("float32")
    x[1] = np.where(rng.random(width) < 0.5, -1e9, x[1])
    x[2:4] = np.sort(x[2:4])
    x[3] = x[3, ::-1]
    x[4] += 5 * (np.arange(width) % 7 == 3)  # Many of them in few columns.
    values, index = (found.numpy() for found in top_k(tf.constant(x), k))
    np.testing.assert_array_equal(values, -np.sort(-x)[:, :k])
    np.testing.assert_array_equal(np.take_along_axis(x, index, 1), values)
    assert all(len(set(row)) == k for row in index)


def test_equal_numbers_are_found_once_each():
    values, index = top_k(tf.zeros([2, 1000]), 6)
    assert not values.numpy().any() and all(len(set(row)) == 6 for row in index.numpy())
    assert index.numpy().max() < 1000


@pytest.mark.parametrize("k", [1, 3])
def test_a_partition_looks_at_its_own_rows_alone(k):
    def fn(args):
        return NestedMap(zip(("largest", "index"), top_k(args.x, k), strict=True))

    x = np.random.default_rng(k).standard_normal((4, 600)).astype("float32")
    specs = NestedMap(x=functions.f32(x.shape, "B_"))
    run = building.compile_fn(fn, 2, {"largest": "B_", "index": "B_"}, args=specs)
    np.testing.assert_array_equal(run(NestedMap(x=x)).largest, -np.sort(-x)[:, :k])
    assert not any(count for _, count in run.report().collectives)
