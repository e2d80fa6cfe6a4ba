"""Reads and writes at an index known only when the program runs.

B rows, L length, M model, K rows of an update.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import slices
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building
from tests.spmd import functions

B, L, M, K = 8, 7, 3, 2


@pytest.fixture(scope="module", params=[1, 8])
def executable(request):
    parts = functions.partitioning(request.param)

    def fn(state):
        cache = slices.write_at(state.cache, state.new, state.start)
        return NestedMap(cache=Annotator(parts).annotate(cache, "BLM"))

    specs = NestedMap(
        cache=functions.f32((B, L, M), "BLM"),
        new=functions.f32((B, K, M), "BLM"),
        start=TensorSpec((), "int32", ""),
    )
    return building.compile_fn(fn, parts, {"cache": "BLM"}, state=specs)


@pytest.mark.parametrize("start", [0, 2, 5, 6])
def test_write_changes_only_given_indices(executable, start):
    rng = np.random.default_rng(1)
    cache, new = (rng.standard_normal((B, n, M)).astype("float32") for n in (L, K))
    got = executable(NestedMap(cache=cache, new=new, start=np.array(start, "int32"))).cache
    start = min(start, L - K)
    cache[:, start : start + K] = new
    np.testing.assert_array_equal(got, cache)


def test_write_needs_no_communication(executable):
    assert sum(count for _, count in executable.report().collectives) == 0


def test_integers():
    @tf.function(jit_compile=True, autograph=False)
    def fn(start):
        written = slices.write_at(
            tf.zeros([3, 2], tf.int32), tf.ones([1, 2], tf.int32), start, axis=0
        )
        return written, slices.read_at(written, start, 2)

    written, read = fn(tf.constant(1))
    assert written.numpy().tolist() == [[0, 0], [1, 1], [0, 0]]
    assert read.numpy().tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("index", [(1,), (1, 2)])
def test_elements(index):
    x = np.random.default_rng(2).standard_normal((2, 3, 4, 5)).astype("float32")
    element = np.ones(x.shape[len(index) :], "float32")

    @tf.function(jit_compile=True, autograph=False)
    def fn(last):
        place = (*index[:-1], last)  # An integer and a tensor.
        read = slices.read_element(tf.constant(x), place)
        return read, slices.write_element(tf.constant(x), tf.constant(element), place)

    read, written = fn(tf.constant(index[-1]))
    np.testing.assert_array_equal(read, x[index])
    x[index] = element
    np.testing.assert_array_equal(written, x)
