"""Tokens in the buffers of their experts, worked out by hand; letters as in dispatch.py.

That indices and one-hot masks have equal gradients, and equal results on any number of devices, is
tested with the layer in moe_test.py.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers import dispatch, gating
from lingvo_gshard.layers.numerics import PLAIN
from tests.layers import building

G, S, E, C, M = 1, 3, 2, 2, 1


@pytest.fixture
def gates():
    """Tokens 0 and 2 choose expert 0 first, token 1 expert 1; all choose the other expert second.

    Each buffer has two places, so the second choices of tokens 1 and 2 find theirs full.
    """
    logits_GSE = tf.constant([[[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    return gating.top2_gating(logits_GSE, tf.ones([G, S]), C)


@pytest.fixture
def indices(gates):
    return dispatch.Indices(gates, C, building.Unannotated(), PLAIN)


def test_tokens_are_in_the_buffers_of_their_experts(indices):
    x_GSM = tf.constant([[[1.0], [2.0], [4.0]]])
    x_EGCM = indices.dispatched(x_GSM)
    assert x_EGCM.shape == [E, G, C, M]
    assert x_EGCM[0, 0, :, 0].numpy().tolist() == [1.0, 4.0]
    assert x_EGCM[1, 0, :, 0].numpy().tolist() == [2.0, 1.0]


def test_outputs_are_weighted_by_the_gates(indices):
    y_GECM = tf.constant([[[[10.0], [20.0]], [[30.0], [40.0]]]])
    y_GSM = indices.combined(y_GECM)
    g1_S = 1 / (1 + np.exp([-2.0, -1.0, -1.0]))
    want_S = [g1_S[0] * 10 + (1 - g1_S[0]) * 40, g1_S[1] * 30, g1_S[2] * 20]
    np.testing.assert_allclose(y_GSM[0, :, 0], want_S, rtol=1e-6)


def test_combine_weights_are_gates_at_positions(gates):
    weights_GSEC = dispatch.combine_weights(gates, C).numpy()
    assert weights_GSEC.shape == (G, S, E, C)
    places = [place.tolist() for place in np.argwhere(weights_GSEC > 0)]
    assert places == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 2, 0, 1]]
