"""Gating against a literal loop over Algorithm 1.

G groups, S tokens of a group, E experts, C capacity.
"""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard.layers import dispatch, gating
from lingvo_gshard.layers.gating import Capacity, CapacityBy

_ALWAYS = np.float32(-1.0)


@dataclasses.dataclass
class _Token:
    """What Algorithm 1 decides of one token: (expert, c, whether it is dispatched, its gate)."""

    first: tuple | None = None
    second: tuple | None = None
    full: bool = False  # It asked for its second expert and found it full.


def _top_2(gates_E):
    """Best and second-best expert, the lower index first; no second one of a single expert."""
    order = sorted(range(len(gates_E)), key=lambda e: (-gates_E[e], e))
    return order[0], order[1] if len(order) > 1 else None


def _algorithm_1(g_SE, real_S, capacity, rnd_S):
    """Lines 1 to 23 for one group, in their order, after the softmax; padding takes no part.

    Returns a _Token for each place of the sequence, and l_aux.
    """
    num_experts = len(g_SE[0])
    tokens = [s for s in range(len(g_SE)) if real_S[s]]
    result_S = [_Token() for _ in g_SE]
    c_E = [0] * num_experts  # line 1
    size = max(1, len(tokens))
    m_E = [sum(g_SE[s][e] for s in tokens) / size for e in range(num_experts)]  # line 3
    for s in tokens:  # line 4
        e1, e2 = _top_2(g_SE[s])
        g1 = g_SE[s][e1] / (g_SE[s][e1] + (g_SE[s][e2] if e2 is not None else np.float32(0)))
        c = c_E[e1]
        result_S[s].first = (e1, c, c < capacity, g1)
        c_E[e1] = c + 1
    aux_loss = sum(c_E[e] / size * m_E[e] for e in range(num_experts)) / num_experts  # line 13
    for s in tokens:  # line 14
        e1, e2 = _top_2(g_SE[s])
        if e2 is None:
            continue
        g2 = g_SE[s][e2] / (g_SE[s][e1] + g_SE[s][e2])
        c = c_E[e2]
        result_S[s].second = (e2, c, bool(c < capacity and 2 * g2 > rnd_S[s]), g2)
        result_S[s].full = bool(c >= capacity and 2 * g2 > rnd_S[s])
        c_E[e2] = c + 1
    return result_S, aux_loss


def _gate(logits_GSE, real_GS, capacity, rnd_GS=_ALWAYS):
    return gating.top2_gating(
        tf.constant(logits_GSE, tf.float32),
        tf.constant(real_GS, tf.float32),
        capacity,
        second_above=tf.constant(0.5 * np.float32(rnd_GS)),
    )


def _decided(choice):
    """A Choice as [G, S] lists of the tuples that _Token holds, None where none was chosen."""
    chosen_GS = choice.mask_GSE.numpy().any(-1)
    experts_GS = choice.mask_GSE.numpy().argmax(-1)
    np.testing.assert_array_equal(experts_GS[chosen_GS], choice.expert_GS.numpy()[chosen_GS])
    parts = (experts_GS, choice.position_GS.numpy(), choice.kept_GS.numpy() > 0, choice.gate_GS)
    return [
        [
            (int(e), int(c), bool(kept), np.float32(gate)) if chosen else None
            for chosen, e, c, kept, gate in zip(*group, strict=True)
        ]
        for group in zip(chosen_GS, *(np.asarray(part) for part in parts), strict=True)
    ]


def _check(logits_GSE, real_GS, capacity, rnd_GS=None):
    """All that top2_gating gives, against the loop: equal to the bit. Returns combine weights."""
    logits_GSE, real_GS = np.float32(logits_GSE), np.float32(real_GS)
    rnd_GS = np.full(real_GS.shape, _ALWAYS) if rnd_GS is None else np.float32(rnd_GS)
    got = _gate(logits_GSE, real_GS, capacity, rnd_GS)
    gates_GSE = tf.nn.softmax(logits_GSE).numpy()  # line 2
    groups = [
        _algorithm_1(*args)
        for args in zip(gates_GSE, real_GS, [capacity] * len(real_GS), rnd_GS, strict=True)
    ]
    assert _decided(got.first) == [[token.first for token in group] for group, _ in groups]
    assert _decided(got.second) == [[token.second for token in group] for group, _ in groups]
    np.testing.assert_allclose(got.routing.aux_loss, np.mean([aux for _, aux in groups]), rtol=1e-5)
    _check_metrics(got.routing, [token for group, _ in groups for token in group], gates_GSE)
    combine_GSEC = dispatch.combine_weights(got, capacity).numpy()
    want_GSEC = np.zeros_like(combine_GSEC)
    for (g, s), token in np.ndenumerate([[*group] for group, _ in groups]):
        for e, c, kept, gate in filter(None, (token.first, token.second)):
            if kept:
                want_GSEC[g, s, e, c] = gate
    np.testing.assert_array_equal(combine_GSEC, want_GSEC)
    return combine_GSEC


def _check_metrics(routing, tokens, gates_GSE):
    """The routing metrics, counted from the loop's decisions."""
    num_experts = gates_GSE.shape[-1]
    real = [token for token in tokens if token.first]
    sent_E = np.zeros(num_experts)
    for choice in [c for token in real for c in (token.first, token.second) if c and c[2]]:
        sent_E[choice[0]] += 1
    load_E = sent_E / max(1.0, sent_E.mean())
    first = [token.first[2] for token in real]
    second = [bool(token.second and token.second[2]) for token in real]
    per_token = 1 / max(1, len(real))
    exact = gates_GSE.reshape(-1, num_experts)[[bool(token.first) for token in tokens]]
    entropy = -np.sum(exact * np.log(np.where(exact > 0, exact, 1.0)))
    want = {
        "load_E": load_E,
        "max_load": load_E.max(),
        "idle_experts": np.sum(sent_E == 0),
        "overflow": sum(not (a or b) for a, b in zip(first, second, strict=True)) * per_token,
        "overflow_first": first.count(False) * per_token,
        "overflow_second": sum(token.full for token in real) * per_token,
        "second_dispatched": second.count(True) * per_token,
        "entropy": entropy * per_token,
    }
    for name, value in want.items():
        np.testing.assert_allclose(
            getattr(routing, name), value, rtol=1e-5, atol=1e-4, err_msg=name
        )


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
    first, second = gating.top2(tf.nn.softmax(tf.constant([[[500.0, 0.0, 0.0]]])))
    assert (first.numpy().item(), second.numpy().item()) == (0, 1)


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
    got = _gate(np.tile(logits_E, (num_groups, 1, 1)), np.ones((num_groups, 1)), 1, rnd)
    assert np.all(got.first.kept_GS == 1) and np.all(got.second.expert_GS == 2)
    probability = 2 / (1 + math.exp(gap))
    deviation = math.sqrt(probability * (1 - probability) / num_groups)
    assert np.mean(got.second.kept_GS) == pytest.approx(probability, abs=4 * deviation)


def test_a_threshold_is_what_the_second_gate_must_exceed():
    g2 = np.array([[0.1, 0.2, 0.3, 0.5]])
    logits = np.stack([np.log(1 - g2), np.log(g2)], -1)
    got = gating.top2_gating(tf.constant(logits, tf.float32), tf.ones([1, 4]), 4, second_above=0.25)
    assert got.second.kept_GS.numpy().tolist() == [[0, 0, 1, 1]]
    assert got.routing.second_dispatched == 0.5 and got.routing.overflow_second == 0


@pytest.mark.parametrize(
    ("rule", "size", "num_experts", "want"),
    [
        ({"factor": 2.0}, 12, 8, 3),
        ({"factor": 2.0}, 13, 8, 4),
        ({"factor": 1.0}, 12, 8, 2),
        ({"factor": 9.0}, 12, 8, 12),
        ({"by": CapacityBy.NUMBER, "number": 5}, 12, 8, 5),
        ({"by": CapacityBy.NUMBER, "number": 50}, 12, 8, 12),
        ({"by": CapacityBy.TOKENS}, 12, 8, 12),
    ],
)
def test_capacity(rule, size, num_experts, want):
    assert Capacity.Params().Set(**rule).Instantiate().places(size, num_experts) == want


@pytest.mark.parametrize("rule", [{"factor": 0.0}, {"number": 0}])
def test_a_capacity_of_nothing_is_refused(rule):
    with pytest.raises(ValueError, match="a factor above 0 and a number of 1 or more"):
        Capacity.Params().Set(**rule).Instantiate()


def test_perfect_balance_gives_one_over_the_squared_number_of_experts():
    logits = np.tile(np.eye(4) * 2.0, (3, 2, 1))
    aux = _gate(logits, np.ones((3, 8)), 4).routing.aux_loss
    np.testing.assert_allclose(aux, 1 / 16, rtol=1e-6)


def test_the_auxiliary_loss_has_a_gradient_that_calms_the_busiest_expert():
    logits = tf.constant([[[1.0, 0.0], [2.0, 0.0], [0.5, 0.0]]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        aux = gating.top2_gating(logits, tf.ones([1, 3]), 3).routing.aux_loss
    gradient = tape.gradient(aux, logits).numpy()
    assert (gradient[..., 0] > 0).all() and (gradient[..., 1] < 0).all()
