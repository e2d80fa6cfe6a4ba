"""Tokens in the buffers of their experts, worked out by hand; letters as in dispatch.py.

That both dispatchers have equal gradients, and equal results on any number of devices, is tested
with the layer in moe_test.py.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers import dispatch, gating
from lingvo_gshard.layers.products import FLOAT32
from tests.layers import building

G, S, E, C, M = 1, 3, 2, 2, 1


@pytest.fixture
def gates():
    """Tokens 0 and 2 choose expert 0 first, token 1 expert 1; all choose the other one second.

    Each buffer has two places, so the second choices of tokens 1 and 2 find theirs full.
    """
    logits_GSE = tf.constant([[[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    return gating.top2_gating(logits_GSE, tf.ones([G, S]), C)


@pytest.fixture(params=[dispatch.Dispatch.EINSUM, dispatch.Dispatch.GATHER])
def dispatcher(request, gates):
    if request.param is dispatch.Dispatch.GATHER:
        return dispatch.IndexedDispatcher(gates, C, building.Unannotated())
    return dispatch.OneHotDispatcher(gates, C, building.Unannotated(), FLOAT32)


def test_tokens_are_in_the_buffers_of_their_experts(dispatcher):
    x_GSM = tf.constant([[[1.0], [2.0], [4.0]]])
    x_EGCM = dispatcher.dispatch(x_GSM)
    assert x_EGCM.shape == [E, G, C, M]
    assert x_EGCM[0, 0, :, 0].numpy().tolist() == [1.0, 4.0]
    assert x_EGCM[1, 0, :, 0].numpy().tolist() == [2.0, 1.0]


def test_outputs_are_weighted_by_the_gates(dispatcher):
    y_GECM = tf.constant([[[[10.0], [20.0]], [[30.0], [40.0]]]])
    y_GSM = dispatcher.combine(y_GECM)
    g1_S = 1 / (1 + np.exp([-2.0, -1.0, -1.0]))
    want_S = [g1_S[0] * 10 + (1 - g1_S[0]) * 40, g1_S[1] * 30, g1_S[2] * 20]
    np.testing.assert_allclose(y_GSM[0, :, 0], want_S, rtol=1e-6)


def test_combine_weights_are_gates_at_positions(gates):
    weights_GSEC = dispatch.combine_weights(gates, C).numpy()
    assert weights_GSEC.shape == (G, S, E, C)
    places = [place.tolist() for place in np.argwhere(weights_GSEC > 0)]
    assert places == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 2, 0, 1]]
