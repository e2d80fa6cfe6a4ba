"""Gating against a literal loop over Algorithm 1.

G groups, S tokens of a group, E experts, C capacity.
"""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard.layers import gating


def _softmax(logits_E):
    exps = np.exp(logits_E - logits_E.max())
    return exps / exps.sum()


def _top_2(gates_E):
    """Best and second-best expert, the lower index first; no second one of a single expert."""
    order = sorted(range(len(gates_E)), key=lambda e: (-gates_E[e], e))
    return order[0], order[1] if len(order) > 1 else None


def _algorithm_1(logits_SE, real_S, capacity, rnd_S):
    """Lines 1 to 23 for one group, in their order; padding takes no part.

    Returns combine weights [S, E, C] and l_aux.
    """
    num_tokens, num_experts = logits_SE.shape
    combine_SEC = np.zeros((num_tokens, num_experts, capacity), np.float32)
    tokens = [s for s in range(num_tokens) if real_S[s]]
    c_E = [0] * num_experts  # line 1
    g_SE = [_softmax(logits_E) for logits_E in logits_SE]  # line 2
    size = max(1, len(tokens))
    m_E = [sum(g_SE[s][e] for s in tokens) / size for e in range(num_experts)]  # line 3
    for s in tokens:  # line 4
        e1, e2 = _top_2(g_SE[s])
        g1 = g_SE[s][e1] / (g_SE[s][e1] + (g_SE[s][e2] if e2 is not None else 0))
        c = c_E[e1]
        if c < capacity:
            combine_SEC[s, e1, c] = g1
        c_E[e1] = c + 1
    aux_loss = sum(c_E[e] / size * m_E[e] for e in range(num_experts)) / num_experts  # line 13
    for s in tokens:  # line 14
        e1, e2 = _top_2(g_SE[s])
        if e2 is None:
            continue
        g2 = g_SE[s][e2] / (g_SE[s][e1] + g_SE[s][e2])
        c = c_E[e2]
        if c < capacity and 2 * g2 > rnd_S[s]:
            combine_SEC[s, e2, c] = g2
        c_E[e2] = c + 1
    return combine_SEC, aux_loss


def _gate(logits_GSE, real_GS, capacity, rnd_GS):
    uniform = None if rnd_GS is None else tf.constant(rnd_GS, tf.float32)
    return gating.top2_gating(
        tf.constant(logits_GSE, tf.float32),
        tf.constant(real_GS, tf.float32),
        capacity,
        uniform_GS=uniform,
    )


def _check(logits_GSE, real_GS, capacity, rnd_GS=None):
    """All that top2_gating gives, against the loop; returns the combine weights."""
    logits_GSE, real_GS = np.float32(logits_GSE), np.float32(real_GS)
    got = _gate(logits_GSE, real_GS, capacity, rnd_GS)
    always = np.full(real_GS.shape, -1.0)  # 2 * g2 is above it for any second expert.
    rnd = always if rnd_GS is None else np.float32(rnd_GS)
    groups = [
        _algorithm_1(*args)
        for args in zip(logits_GSE, real_GS, [capacity] * len(real_GS), rnd, strict=True)
    ]
    want_GSEC = np.stack([combine for combine, _ in groups])
    combine_GSEC = got.combine_GSEC.numpy()
    np.testing.assert_array_equal(combine_GSEC > 0, want_GSEC > 0)
    np.testing.assert_allclose(combine_GSEC, want_GSEC, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got.aux_loss, np.mean([aux for _, aux in groups]), rtol=1e-5)
    # A choice whose gate underflowed to 0 is counted as sent, though it weighs nothing.
    if np.ptp(logits_GSE) < 50:
        sent_E = (want_GSEC > 0).sum((0, 1, 3))
        np.testing.assert_allclose(got.load_E, sent_E / max(1.0, sent_E.mean()), rtol=1e-6)
        nowhere = real_GS * (want_GSEC.sum((2, 3)) == 0)
        np.testing.assert_allclose(got.overflow, nowhere.sum() / max(1, real_GS.sum()), rtol=1e-6)
    return combine_GSEC


def _random(num_groups, size, num_experts, seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_groups, size, num_experts)) * 1.5
    real = rng.random((num_groups, size)) < 0.8
    return logits, real, rng.random((num_groups, size))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [1, 3, 11])
@pytest.mark.parametrize("random_second", [False, True])
def test_random_inputs(seed, capacity, random_second):
    logits, real, rnd = _random(3, 11, 5, seed)
    _check(logits, real, capacity, rnd if random_second else None)


def test_all_tokens_to_one_expert():
    logits = np.zeros((2, 9, 4))
    logits[..., 2], logits[..., 1] = 3.0, 1.0
    combine = _check(logits, np.ones((2, 9)), 3)
    # The first three fill expert 2, and the same three, by their second choice, expert 1.
    assert np.argwhere(combine[0].sum(-1) > 0).tolist() == [
        [s, e] for s in range(3) for e in (1, 2)
    ]


def test_ties_go_to_the_lower_expert():
    combine = _check(np.zeros((1, 4, 3)), np.ones((1, 4)), 4)
    np.testing.assert_allclose(combine[0, :, :2].sum(-1), np.full((4, 2), 0.5))
    assert combine[0, :, 2].sum() == 0


def test_second_choices_start_where_first_ones_ended():
    # Tokens 0 and 1 prefer expert 0; token 2 has it second: its place there is 2.
    logits = [[[2.0, 1.0, 0.0], [2.0, 0.0, 1.0], [1.0, 0.0, 2.0]]]
    combine = _check(logits, np.ones((1, 3)), 3)
    assert [np.argwhere(combine[0, s] > 0).tolist() for s in range(3)] == [
        [[0, 0], [1, 0]],
        [[0, 1], [2, 1]],
        [[0, 2], [2, 0]],
    ]


def test_a_counter_advances_though_its_token_is_not_dispatched():
    # Tokens 0 to 2 have expert 1 second. The middle one draws a number above 2 * g2 and stays
    # away, yet its place is gone: the last one finds the buffer of two full.
    logits = [[[2.0, 1.0, 0.0]] * 3]
    combine = _check(logits, np.ones((1, 3)), 2, [[0.0, 0.999, 0.0]])
    assert np.argwhere(combine[0, :, 1] > 0).tolist() == [[0, 0]]


def test_one_token_one_expert_and_no_token():
    assert _check(np.zeros((1, 1, 1)), np.ones((1, 1)), 1)[0, 0, 0, 0] == 1
    _check(np.ones((2, 5, 1)), np.ones((2, 5)), 3)
    assert not _check(np.ones((2, 5, 4)), np.zeros((2, 5)), 3).any()


def test_padding_takes_no_place():
    logits = np.zeros((1, 6, 2))
    logits[..., 0] = 1.0
    combine = _check(logits, [[0, 1, 0, 0, 1, 1]], 2)
    assert np.argwhere(combine[0, :, 0] > 0).tolist() == [[1, 0], [4, 1]]


def test_a_gate_that_underflowed_still_comes_before_the_first_choice():
    first, second = gating.top2_masks(
        tf.nn.softmax(tf.constant([[[500.0, 0.0, 0.0]]])), tf.ones([1, 1])
    )
    assert first.numpy()[0, 0].tolist() == [1, 0, 0]
    assert second.numpy()[0, 0].tolist() == [0, 1, 0]


_LOGIT = st.sampled_from([i / 2 for i in range(-6, 7)] + [-200.0, 200.0])


@st.composite
def _groups(draw):
    num_groups, size = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 4))

    def array(shape, values):
        flat = draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)))
        return np.reshape(flat, shape)

    tokens = (num_groups, size)
    uniform = array(tokens, st.sampled_from([i / 8 + 0.0123 for i in range(8)]))
    return (
        array((*tokens, num_experts), _LOGIT),
        array(tokens, st.sampled_from([0, 1])),
        draw(st.integers(1, 7)),
        draw(st.sampled_from([None, uniform])),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_groups())
def test_any_input(groups):
    _check(*groups)


@pytest.mark.parametrize("gap", [0.3, 1.0, 3.0])
def test_the_second_expert_is_taken_with_twice_its_gate_as_probability(gap):
    num_groups, logits_E = 20_000, [gap, -20.0, 0.0]
    rnd = np.random.default_rng(5).random((num_groups, 1))
    combine = _gate(np.tile(logits_E, (num_groups, 1, 1)), np.ones((num_groups, 1)), 1, rnd)
    share_E = np.mean(combine.combine_GSEC.numpy() > 0, axis=(0, 1, 3))
    assert share_E[0] == 1 and share_E[1] == 0
    probability = 2 / (1 + math.exp(gap))
    deviation = math.sqrt(probability * (1 - probability) / num_groups)
    assert share_E[2] == pytest.approx(probability, abs=4 * deviation)


@pytest.mark.parametrize(
    ("factor", "size", "num_experts", "want"),
    [(2.0, 12, 8, 3), (2.0, 13, 8, 4), (1.0, 12, 8, 2), (None, 12, 8, 12), (9.0, 12, 8, 12)],
)
def test_capacity(factor, size, num_experts, want):
    assert gating.capacity(factor, size, num_experts) == want


def test_perfect_balance_gives_one_over_the_squared_number_of_experts():
    logits = np.tile(np.eye(4) * 2.0, (3, 2, 1))
    aux = _gate(logits, np.ones((3, 8)), 4, None).aux_loss
    np.testing.assert_allclose(aux, 1 / 16, rtol=1e-6)


def test_the_auxiliary_loss_has_a_gradient_that_calms_the_busiest_expert():
    logits = tf.constant([[[1.0, 0.0], [2.0, 0.0], [0.5, 0.0]]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        aux = gating.top2_gating(logits, tf.ones([1, 3]), 3).aux_loss
    gradient = tape.gradient(aux, logits).numpy()
    assert (gradient[..., 0] > 0).all() and (gradient[..., 1] < 0).all()
