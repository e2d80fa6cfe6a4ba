"""Layer normalization against numpy (moe_test.py has the feed-forward's); dropout."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.norms import LayerNorm
from tests.layers import building


def test_equals_numpy():
    layer = LayerNorm.Params().Set(dim=6).Instantiate(building.Unannotated())
    theta = building.random_theta(layer)
    x = np.random.default_rng(2).normal(5.0, 3.0, (4, 3, 6)).astype("float32")
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    want = normal * theta.scale + theta.bias
    np.testing.assert_allclose(layer.FProp(theta, tf.constant(x)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_gradients_equal_the_formula(dtype):
    layer = LayerNorm.Params().Set(dim=6).Instantiate(building.Unannotated())
    theta = building.random_theta(layer)
    rng = np.random.default_rng(2)
    x = tf.cast(rng.normal(5.0, 3.0, (4, 3, 6)), dtype)
    d_y = tf.cast(rng.standard_normal((4, 3, 6)), dtype)

    def formula(theta, x):
        wide = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(wide, [-1], keepdims=True)
        normal = (wide - mean) / tf.sqrt(variance + 1e-6)
        return tf.cast(normal * theta.scale + theta.bias, dtype)

    theta = theta.Transform(tf.constant)
    leaves = [x, theta.scale, theta.bias]
    gradients = []
    for fn in (layer.FProp, formula):
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y = fn(theta, x)
        gradients.append(tape.gradient(y, leaves, d_y))

    for got, want in zip(*gradients, strict=True):
        assert got.dtype == want.dtype
        rtol = 1e-4 if dtype == tf.float32 else 2**-7
        np.testing.assert_allclose(
            tf.cast(got, tf.float32), tf.cast(want, tf.float32), rtol=rtol, atol=1e-5
        )


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.EVAL])
def test_hidden_units_are_dropped_only_in_training(mode):
    p = FeedForwardLayer.Params().Set(dim=6, hidden_dim=6, **{"hidden_dropout.rate": 0.25})
    layer = p.Instantiate(building.Unannotated())
    theta = building.random_theta(layer)
    theta.wo = np.eye(6, dtype="float32")  # So that the output is the hidden units.
    x = np.random.default_rng(3).standard_normal((40, 50, 6)).astype("float32")
    seed = tf.constant([1, 2]) if mode is Mode.TRAIN else None
    y = layer.FProp(theta, tf.constant(x), Context(mode, seed)).numpy()
    hidden = np.maximum(x @ theta.wi, 0)
    kept = y != 0
    share, scale = (0.75, 1 / 0.75) if seed is not None else (1, 1)
    np.testing.assert_allclose(y[kept], scale * hidden[kept], rtol=1e-4, atol=1e-5)
    assert np.mean(kept[hidden > 1e-3]) == pytest.approx(share, abs=0.02)
