"""Products computed, recorded and replayed."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.context import Context, Mode, computed, recording, replaying

_X, _W = tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [4.0]])


def test_recorded_results_equal_computed_ones_in_order():
    results = []
    recorded = recording(results)
    for equation, left, right in [("BM,MH->BH", _X, _W), ("MB,BM->M(BM)", _W, _X)]:
        np.testing.assert_array_equal(
            recorded(equation, tf.matmul, left, right), computed(equation, tf.matmul, left, right)
        )
    assert [dims for dims, _ in results] == ["BH", "MB"]
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


def test_einsum_records_the_product_with_a_weight():
    results = []
    context = Context(Mode.EVAL, product=recording(results))
    y = context.einsum("BM,MH->BH", _X, _W)
    assert y.numpy().tolist() == [[11.0]]
    assert [dims for dims, _ in results] == ["BH"]
    context.unrecorded().einsum("BM,MH->BH", _X, _W)
    assert len(results) == 1
