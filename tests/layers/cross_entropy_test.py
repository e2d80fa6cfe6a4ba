"""Cross entropies and their gradient against float64 formulas and finite differences."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.cross_entropy import cross_entropies

B, L, V = 2, 3, 7


def _formula(logits, labels):
    """Both cross entropies, from probabilities in float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    label = np.array([[log_p[b, i, labels[b, i]] for i in range(L)] for b in range(B)])
    return -label, -log_p.mean(-1)


def _inputs(scale):
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((B, L, V)) * scale
    return logits, rng.integers(0, V, (B, L)).astype("int32"), rng.standard_normal((2, B, L))


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_values_equal_float64_formula(scale):
    logits, labels, _ = _inputs(scale)
    got = cross_entropies(tf.constant(logits, tf.float32), tf.constant(labels))
    for a, b in zip(got, _formula(logits, labels), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_equal_logits_give_log_of_vocabulary_size():
    label, uniform = cross_entropies(tf.zeros([B, L, V]), tf.zeros([B, L], tf.int32))
    np.testing.assert_allclose(label, np.full((B, L), np.log(V)), rtol=1e-6)
    np.testing.assert_allclose(uniform, label, rtol=1e-6)


def test_gradient_equals_finite_differences():
    logits, labels, (on_label, on_uniform) = _inputs(1.5)

    def loss(logits):
        label, uniform = _formula(logits, labels)
        return (label * on_label + uniform * on_uniform).sum()

    want, step = np.zeros_like(logits), 1e-5
    for index in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[index] += step
        down[index] -= step
        want[index] = (loss(up) - loss(down)) / (2 * step)
    x = tf.constant(logits, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        label, uniform = cross_entropies(x, tf.constant(labels))
        total = tf.reduce_sum(label * np.float32(on_label) + uniform * np.float32(on_uniform))
    np.testing.assert_allclose(tape.gradient(total, x), want, rtol=1e-4, atol=1e-5)
