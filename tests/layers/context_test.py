"""Products computed, recorded and replayed."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.context import computed, recording, replaying

_X, _W = tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [4.0]])


def test_recorded_results_equal_computed_ones_in_order():
    results = []
    recorded = recording(results)
    for dims, product, *factors in [("BH", tf.matmul, _X, _W), ("MM", tf.matmul, _W, _X)]:
        np.testing.assert_array_equal(
            recorded(dims, product, *factors), computed(dims, product, *factors)
        )
    assert [dims for dims, _ in results] == ["BH", "MM"]
    assert [result.numpy().tolist() for _, result in results] == [
        [[11.0]],
        [[3.0, 6.0], [4.0, 8.0]],
    ]


def test_replayed_result_has_recorded_value_and_product_gradients():
    replayed = replaying([tf.constant([[7.0]]), tf.constant([[8.0]])])
    with tf.GradientTape() as tape:
        tape.watch([_X, _W])
        first, second = (replayed("BH", tf.matmul, _X, _W) for _ in range(2))
        both = first + 10.0 * second
    assert both.numpy().tolist() == [[87.0]]
    d_x, d_w = tape.gradient(both, [_X, _W])
    np.testing.assert_array_equal(d_x, 11.0 * tf.transpose(_W))
    np.testing.assert_array_equal(d_w, 11.0 * tf.transpose(_X))


def test_replaying_beyond_recorded_results_fails():
    with pytest.raises(IndexError):
        replaying([])("BH", tf.matmul, _X, _W)
