"""Embedding: rows, scale and positions. Cross entropies against formulas and differences."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.vocabulary import EmbeddingLayer, cross_entropies
from lingvo_gshard.sharding.layout import Partitioning
from tests.layers import building
from tests.spmd import functions
from xla_spmd.mesh import Mesh

B, L, V, M = 2, 3, 9, 6

_EVAL = Context(Mode.EVAL)


def test_equals_scaled_row_plus_sinusoids():
    layer = EmbeddingLayer.Params().Set(vocab_size=V, dim=M).Instantiate(building.Unannotated())
    theta = building.random_theta(layer)
    ids, positions = np.array([[3, 0, 8], [8, 1, 3]]), np.array([[0, 1, 2], [0, 0, 40]])
    got = layer.FProp(
        theta, tf.constant(ids, tf.int32), tf.constant(positions, tf.int32), Context(Mode.EVAL)
    ).numpy()
    for b, i in np.ndindex(2, 3):
        rates = [1.0, 10000**-0.5, 10000**-1.0]
        angles = [positions[b, i] * rate for rate in rates]
        waves = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        want = theta.table[ids[b, i]] * math.sqrt(M) + waves
        np.testing.assert_allclose(got[b, i], want, rtol=1e-5, atol=1e-6)


def test_the_first_position_may_differ_from_0():
    p = EmbeddingLayer.Params().Set(vocab_size=V, dim=M)
    theta = building.random_theta(p.Instantiate(building.Unannotated()))
    shifted = p.Copy().Set(first_position=2).Instantiate(building.Unannotated())
    ids = tf.constant([[3, 0, 8]])
    got = shifted.FProp(theta, ids, tf.constant([[0, 1, 0]]), _EVAL)
    want = p.Instantiate(building.Unannotated()).FProp(
        theta, ids, tf.constant([[2, 3, 2]]), Context(Mode.EVAL)
    )
    np.testing.assert_array_equal(got, want)


def test_odd_dim_is_refused():
    p = EmbeddingLayer.Params().Set(vocab_size=V, dim=5)
    with pytest.raises(ValueError, match="words: dim must be even, got 5"):
        p.Instantiate(building.Unannotated(), "words")


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
    for a, b in zip(got[:2], _formula(logits, labels), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[2], np.logaddexp.reduce(logits, -1), rtol=1e-5, atol=1e-5)


def test_gradient_equals_finite_differences():
    logits, labels, (on_label, on_uniform) = _inputs(1.5)

    def loss(logits):
        label, uniform = _formula(logits, labels)
        normalizer = np.logaddexp.reduce(logits, -1)
        return (label * on_label + uniform * on_uniform + 0.3 * normalizer**2).sum()

    want, step = np.zeros_like(logits), 1e-5
    for index in np.ndindex(*logits.shape):
        up, down = logits.copy(), logits.copy()
        up[index] += step
        down[index] -= step
        want[index] = (loss(up) - loss(down)) / (2 * step)
    x = tf.constant(logits, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        label, uniform, normalizer = cross_entropies(x, tf.constant(labels))
        weighted = label * np.float32(on_label) + uniform * np.float32(on_uniform)
        total = tf.reduce_sum(weighted + 0.3 * normalizer**2)
    np.testing.assert_allclose(tape.gradient(total, x), want, rtol=1e-4, atol=1e-5)


def _compiled(mesh, table):
    """Both cross entropies of partitioned logits, and the gradient of a sum of them."""

    def fn(batch):
        labels = tf.cast(batch.labels, tf.int32)
        with tf.GradientTape() as tape:
            tape.watch(batch.logits)
            label, uniform, normalizer = cross_entropies(batch.logits, labels)
            loss = tf.reduce_sum(label * batch.weights + 0.1 * uniform + 0.2 * normalizer**2)
        d_logits = tape.gradient(loss, batch.logits)
        return NestedMap(label=label, uniform=uniform, d_logits=d_logits)

    specs = NestedMap(
        logits=functions.f32((8, 4, 16), "BLV"),
        labels=functions.f32((8, 4), "BL"),
        weights=functions.f32((8, 4), "BL"),
    )
    dims = {"label": "BL", "uniform": "BL", "d_logits": "BLV"}
    return building.compile_fn(fn, Partitioning.from_dict(mesh, table), dims, batch=specs)


@pytest.mark.slow
def test_rows_or_vocabulary_may_be_partitioned():
    rng = np.random.default_rng(3)
    batch = NestedMap(
        logits=rng.standard_normal((8, 4, 16)).astype("float32"),
        labels=rng.integers(0, 16, (8, 4)).astype("float32"),
        weights=rng.standard_normal((8, 4)).astype("float32"),
    )
    want = _compiled(Mesh.flat(1), {})(batch).Transform(np.asarray)

    for mesh, table in (
        (Mesh.flat(2), {"B": "d"}),
        (Mesh.flat(4), {"V": "d"}),
        (Mesh(("x", "y"), (2, 4)), {"B": "x", "V": "y"}),
    ):
        run = _compiled(mesh, table)
        building.assert_close(run(batch).Transform(np.asarray), want)
        # Sums over V are exchanged, but not logits.
        exchanged = r" (all-gather|all-to-all|collective-permute)(-start)?\("
        assert not re.search(exchanged, run.compiled.as_text()), table
