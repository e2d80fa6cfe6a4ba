"""Embedding: rows, scale and positions."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers import embedding
from lingvo_gshard.layers.embedding import EmbeddingLayer
from tests.layers import building

V, M = 9, 6


def test_equals_scaled_row_plus_sinusoids():
    layer = EmbeddingLayer.Params().Set(vocab_size=V, dim=M).Instantiate(building.Unannotated())
    theta = building.random_theta(layer)
    ids, positions = np.array([[3, 0, 8], [8, 1, 3]]), np.array([[0, 1, 2], [0, 0, 40]])
    got = layer.FProp(theta, tf.constant(ids, tf.int32), tf.constant(positions, tf.int32)).numpy()
    for b, i in np.ndindex(2, 3):
        rates = [1.0, 10000**-0.5, 10000**-1.0]
        angles = [positions[b, i] * rate for rate in rates]
        waves = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        want = theta.table[ids[b, i]] * math.sqrt(M) + waves
        np.testing.assert_allclose(got[b, i], want, rtol=1e-5, atol=1e-6)


def test_positions_are_distinct():
    waves = embedding.sinusoids(tf.range(2048), 32).numpy()
    gaps = np.linalg.norm(waves[:, None] - waves[None], axis=-1) + 9 * np.eye(2048)
    assert gaps.min() > 0.1


def test_two_dims_are_one_sine_and_cosine():
    got = embedding.sinusoids(tf.constant([2]), 2)
    np.testing.assert_allclose(got, [[math.sin(2), math.cos(2)]], rtol=1e-6)


def test_odd_dim_is_refused():
    p = EmbeddingLayer.Params().Set(vocab_size=V, dim=5)
    with pytest.raises(ValueError, match="words: dim must be even, got 5"):
        p.Instantiate(building.Unannotated(), "words")
