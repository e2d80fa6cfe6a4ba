"""Dropout: the share of zeros, the scale of the rest, and when nothing is dropped."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dropout import DropoutLayer
from tests.layers import building

_SHAPE = (64, 50, 30)


def _dropped(seed=(1, 2), rate=0.3, path="a.dropout"):
    layer = DropoutLayer.Params().Set(rate=rate).Instantiate(building.Unannotated(), path)

    @tf.function(jit_compile=True, autograph=False)
    def fn(seed):
        x = tf.fill(_SHAPE, 2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer.FProp(None, x, "BLM", Context(Mode.TRAIN, seed))
        return y, tape.gradient(y, x)

    return [tensor.numpy() for tensor in fn(tf.constant(seed))]


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9])
def test_share_of_zeros_and_scale_of_the_rest(rate):
    y, d_x = _dropped(rate=rate)
    share, deviation = np.mean(y == 0), math.sqrt(rate * (1 - rate) / y.size)
    assert abs(share - rate) < 5 * deviation
    np.testing.assert_allclose(y[y != 0], 2 / (1 - rate), rtol=1e-6)
    np.testing.assert_allclose(d_x, y / 2, rtol=1e-6)


def test_steps_and_layers_have_independent_masks():
    zero, same, other_step, other_layer = (
        _dropped(**changes)[0] == 0 for changes in ({}, {}, {"seed": (1, 3)}, {"path": "b.dropout"})
    )
    np.testing.assert_array_equal(zero, same)
    for other in (other_step, other_layer):
        # Independent masks agree on 0.3^2 + 0.7^2 of the elements.
        assert np.mean(zero == other) == pytest.approx(0.58, abs=0.01)


@pytest.mark.parametrize(
    ("context", "rate"),
    [
        (Context(Mode.EVAL), 0.5),
        (Context(Mode.PREDICT), 0.5),
        (Context(Mode.TRAIN, tf.constant([1, 2])), 0.0),
    ],
)
def test_nothing_is_dropped_unless_training_at_positive_rate(context, rate):
    layer = DropoutLayer.Params().Set(rate=rate).Instantiate(building.Unannotated())
    x = tf.ones([2, 3, 4])
    assert layer.FProp(None, x, "BLM", context) is x


@pytest.mark.parametrize(("mode", "seed"), [(Mode.TRAIN, None), (Mode.EVAL, tf.constant([1, 2]))])
def test_context_needs_seed_exactly_when_training(mode, seed):
    with pytest.raises(ValueError, match=f"a seed is required in mode TRAIN .* got {mode.name}"):
        Context(mode, seed)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_rate_outside_0_to_1_is_refused(rate):
    with pytest.raises(ValueError, match=rf"rate must be in \[0, 1\), got {rate}"):
        DropoutLayer.Params().Set(rate=rate).Instantiate(building.Unannotated())
