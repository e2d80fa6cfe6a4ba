"""Random numbers against a literal loop and statistics, and their partitioning."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import random
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building
from tests.spmd import functions

_SHAPE = (16, 33, 7)
_COUNT = 2**18


def _finalize(x):
    """murmur3's 32-bit finalizer on Python integers."""
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _literal_bits(count, seed):
    keys = [half % 2**32 for half in seed]
    first = _finalize((keys[0] + 0x9E3779B9) % 2**32)
    second = _finalize((keys[1] + 0x7F4A7C15) % 2**32)
    return [_finalize((_finalize(i ^ first) + second) % 2**32) for i in range(count)]


@tf.function(jit_compile=True, autograph=False)
def _bits(seed):
    return random.random_bits((_COUNT,), seed)


@pytest.mark.parametrize("seed", [(0, 0), (3, -4), (-(2**31), 2**31 - 1)])
def test_bits_equal_literal_loop(seed):
    got = _bits(tf.constant(seed, tf.int32)).numpy()
    np.testing.assert_array_equal(got[:300], np.array(_literal_bits(300, seed), np.uint32))


def test_each_row_has_the_numbers_of_its_own_seed():
    seeds = tf.constant([[3, -4], [3, -4], [0, 9]], tf.int32)
    got = random.random_bits((3, 11, 5), seeds).numpy()
    want = [random.random_bits((11, 5), seed).numpy() for seed in seeds]
    np.testing.assert_array_equal(got, want)
    assert not np.array_equal(got[0], got[2])


@pytest.fixture(scope="module")
def results():
    """(results, compiled text) by number of partitions."""
    found = {}
    for n in (1, 2, 4, 8):
        parts = functions.partitioning(n)

        def fn(batch, parts=parts):
            uniform = random.random_uniform(_SHAPE, batch.seed)
            mask = random.random_mask(_SHAPE, batch.seed, 0.3)
            x_BLM = batch.x_BLM * Annotator(parts).annotate(uniform, "BLM")
            return NestedMap(x_BLM=tf.where(Annotator(parts).annotate(mask, "BLM"), x_BLM, -1.0))

        specs = NestedMap(x_BLM=functions.f32(_SHAPE, "BLM"), seed=TensorSpec((2,), "int32", "_"))
        executable = building.compile_fn(fn, n, {"x_BLM": "BLM"}, batch=specs)
        arrays = NestedMap(x_BLM=np.ones(_SHAPE, "float32"), seed=np.array([5, 6], np.int32))
        found[n] = np.asarray(executable(arrays).x_BLM), executable.compiled.as_text()
    return found


@pytest.mark.parametrize("num_partitions", [1, 2, 4, 8])
def test_numbers_are_the_same_for_any_partitioning(results, num_partitions):
    bits = np.array(_literal_bits(math.prod(_SHAPE), (5, 6)), np.uint32).reshape(_SHAPE)
    uniform = (bits >> 8).astype("float32") / 2**24
    want = np.where(bits <= round(0.3 * 2**32), uniform, -1.0)
    np.testing.assert_array_equal(results[num_partitions][0], want)


def test_partition_computes_only_its_own_part(results):
    (_, one), (_, eight) = results[1], results[8]
    full, part = ("[16,33,7]", "[2,33,7]")
    assert full in one
    assert full not in eight and part in eight
    assert "all-" not in eight


def _correlation(x, y):
    return abs(np.corrcoef(x, y)[0, 1]) * math.sqrt(len(x))  # in standard deviations


def test_dims_beyond_32_bit_indices_get_independent_numbers(monkeypatch):
    monkeypatch.setattr(random, "_MAX_INDICES", 4096)
    seed = tf.constant([1, 2])
    rows = random.random_uniform((64, 16, 256), seed).numpy().reshape(64, -1)
    assert len(np.unique(rows)) > 0.99 * rows.size
    for row, after in itertools.pairwise(rows):
        assert _correlation(row, after) < 5
    assert np.array_equal(rows[0], random.random_uniform((16, 256), seed).numpy().ravel())


def test_shape_beyond_two_32_bit_indices_is_refused():
    with pytest.raises(ValueError, match=r"random_bits: \(65537, 65537, 65536\) has too many elem"):
        random.random_bits((2**16 + 1, 2**16 + 1, 2**16), tf.constant([0, 0]))


def test_beyond_32_bits_all_rows_differ(monkeypatch):
    monkeypatch.setattr(random, "_MAX_INDICES", 2**8)
    shape = (16, 2**8)
    rows = [
        row.tobytes()
        for step in range(4)
        for row in random._random_bits(shape, tf.constant([1, step])).numpy()
    ]
    assert len(set(rows)) == 4 * 16
