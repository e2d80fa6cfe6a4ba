"""Rows by index are those that NumPy takes; b, n, k and P differ, so that a wrong axis fails."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode import rows

_RNG = np.random.default_rng(0)
_INDEX_BK = _RNG.integers(0, 5, (2, 3)).astype("int32")


def test_masks_are_reordered():
    mask_BNP = _RNG.integers(0, 2, (2, 5, 7)).astype("float32")
    want = np.take_along_axis(mask_BNP, _INDEX_BK[..., None], 1)
    np.testing.assert_array_equal(rows.reordered(tf.constant(mask_BNP), _INDEX_BK), want)


def test_numbers_are_picked_and_gathered():
    x_BN = _RNG.standard_normal((2, 5)).astype("float32")
    want = np.take_along_axis(x_BN, _INDEX_BK, 1)
    np.testing.assert_array_equal(rows.picked(tf.constant(x_BN), _INDEX_BK), want)
    np.testing.assert_array_equal(rows.gathered(tf.constant(x_BN), _INDEX_BK), want)


def test_columns_are_gathered():
    x_BPN = _RNG.standard_normal((2, 7, 5)).astype("float32")
    got = rows.gathered(tf.constant(x_BPN), _INDEX_BK, axis=2)
    np.testing.assert_array_equal(got, np.take_along_axis(x_BPN, _INDEX_BK[:, None], 2))


def test_what_is_alive_is_new():
    new, old = (NestedMap(a=tf.fill([2], i), b=tf.fill([2, 3], i)) for i in (1, 0))
    got = rows.where(tf.constant([True, False]), new, old)
    assert got.a.numpy().tolist() == [1, 0] and got.b.numpy().tolist() == [[1] * 3, [0] * 3]


def test_a_column_beyond_the_last_is_zero():
    x_BF = tf.constant([[1, 2], [3, 4]])
    got = [rows.column(x_BF, tf.constant(step)).numpy().tolist() for step in (0, 1, 2)]
    assert got == [[1, 3], [2, 4], [0, 0]]
