"""Layer normalization against numpy (moe_test.py holds that of the dense feed-forward)."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.layers.feed_forward import LayerNorm
from tests.layers import building


def test_equals_numpy():
    layer = LayerNorm.Params().Set(dim=6).Instantiate(building.Unannotated())
    theta = building.random_theta(layer)
    x = np.random.default_rng(2).normal(5.0, 3.0, (4, 3, 6)).astype("float32")
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    want = normal * theta.scale + theta.bias
    np.testing.assert_allclose(layer.FProp(theta, tf.constant(x)), want, rtol=1e-4, atol=1e-5)


def test_constant_row_becomes_bias():
    layer = LayerNorm.Params().Set(dim=6).Instantiate(building.Unannotated())
    theta = building.random_theta(layer)
    np.testing.assert_allclose(layer.FProp(theta, tf.fill([2, 6], 7.0)), [theta.bias] * 2)


def test_initial_scale_is_1_and_bias_0():
    specs = LayerNorm.Params().Set(dim=6).Instantiate(building.Unannotated()).weight_specs
    assert (specs.scale.scale, specs.bias.scale) == (1.0, 0.0)
