"""Gating against a literal loop over the lines of Algorithm 1.

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
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.routing import statistics as routing_statistics
from tests.layers import building

_ALWAYS = np.float32(-1.0)


@dataclasses.dataclass
class _Token:
    """Algorithm 1's decisions for one token: (expert, c, whether it is dispatched, gate)."""

    first: tuple | None = None
    second: tuple | None = None
    full: bool = False  # The token asked for its second expert, which was full.


def _top_2(gates_E):
    """The best and second-best expert, which is None for one expert; the lower index wins a tie."""
    order = sorted(range(len(gates_E)), key=lambda e: (-gates_E[e], e))
    return order[0], order[1] if len(order) > 1 else None


def _algorithm_1(g_SE, valid_S, rnd_S, capacity, all_counted):
    """Lines 1 to 23 for one group, in order, after the softmax; padding does not count.

    Line 22 counts second choices that the draw skips only if `all_counted`. Returns a _Token for
    each element of the sequence, and l_aux.
    """
    num_experts = len(g_SE[0])
    tokens = [s for s in range(len(g_SE)) if valid_S[s]]
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
        asks = bool(2 * g2 > rnd_S[s])
        result_S[s].second = (e2, c, c < capacity and asks, g2)
        result_S[s].full = c >= capacity and asks
        if asks or all_counted:
            c_E[e2] = c + 1  # line 22
    return result_S, aux_loss


def _gate(logits_GSE, valid_GS, capacity, rnd_GS=_ALWAYS, all_counted=False):
    return gating.top2_gating(
        tf.constant(logits_GSE, tf.float32),
        tf.constant(valid_GS, tf.float32),
        capacity,
        second_above=tf.constant(0.5 * np.float32(rnd_GS)),
        all_counted=all_counted,
    )


def _decided(choice):
    """A Choice as [G, S] lists of tuples as in _Token; None where nothing was chosen."""
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


def _check(logits_GSE, valid_GS, capacity, rnd_GS=None, all_counted=False):
    """Checks top2_gating against the loop, choices bit for bit. Returns the combine weights."""
    logits_GSE, valid_GS = np.float32(logits_GSE), np.float32(valid_GS)
    rnd_GS = np.full(valid_GS.shape, _ALWAYS) if rnd_GS is None else np.float32(rnd_GS)
    got = _gate(logits_GSE, valid_GS, capacity, rnd_GS, all_counted)
    gates_GSE = tf.nn.softmax(logits_GSE).numpy()  # line 2
    groups = [
        _algorithm_1(*args, capacity, all_counted)
        for args in zip(gates_GSE, valid_GS, rnd_GS, strict=True)
    ]
    assert _decided(got.choices[0]) == [[token.first for token in group] for group, _ in groups]
    assert _decided(got.choices[1]) == [[token.second for token in group] for group, _ in groups]
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
    """Checks the routing metrics against counts of the loop's decisions."""
    num_experts = gates_GSE.shape[-1]
    valid = [token for token in tokens if token.first]
    sent_E = np.zeros(num_experts)
    for choice in [c for token in valid for c in (token.first, token.second) if c and c[2]]:
        sent_E[choice[0]] += 1
    load_E = sent_E / (sent_E.mean() or 1.0)
    first = [token.first[2] for token in valid]
    second = [bool(token.second and token.second[2]) for token in valid]
    per_token = 1 / max(1, len(valid))
    exact = gates_GSE.reshape(-1, num_experts)[[bool(token.first) for token in tokens]]
    entropy = -np.sum(exact * np.log(np.where(exact > 0, exact, 1.0)))
    want = {
        "load_E": load_E,
        "max_load": load_E.max(),
        "idle_experts": np.sum(sent_E == 0),
        "overflow": sum(not (a or b) for a, b in zip(first, second, strict=True)) * per_token,
        "overflow_first": first.count(False) * per_token,
        "overflow_second": sum(token.full for token in valid) * per_token,
        "second_dispatched": second.count(True) * per_token,
        "entropy": entropy * per_token,
    }
    got = routing_statistics(routing.by_name())
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(("all_counted", "taken"), [(False, [[0, 0], [2, 1]]), (True, [[0, 0]])])
def test_second_choice_that_the_draw_skips_takes_a_place_only_if_all_are_counted(
    all_counted, taken
):
    # All tokens choose expert 1 second, whose buffer has two places. The middle one draws a number
    # above 2 * g2 and is not dispatched.
    logits = [[[2.0, 1.0, 0.0]] * 3]
    combine = _check(logits, np.ones((1, 3)), 2, [[0.0, 0.999, 0.0]], all_counted)
    assert np.argwhere(combine[0, :, 1] > 0).tolist() == taken


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
        draw(st.booleans()),
    )


@settings(max_examples=120, deadline=None, derandomize=True)
@given(_groups())
def test_any_input_equals_literal_loop(groups):
    _check(*groups)


@pytest.mark.parametrize(
    ("rule", "size", "num_experts", "want"),
    [
        ({"factor": 2.0}, 13, 8, 4),
        ({"factor": 1.0}, 12, 8, 2),
        ({"factor": 9.0}, 12, 8, 12),
        ({"by": CapacityBy.TOKENS}, 12, 8, 12),
        ({"multiple_of": 4}, 2048, 2048, 4),  # Twice the paper's 2.
        ({"multiple_of": 4}, 36, 8, 12),  # 9, rounded up.
        ({"multiple_of": 4}, 3, 8, 3),  # All three tokens.
    ],
)
def test_capacity(rule, size, num_experts, want):
    assert Capacity.Params().Set(**rule).Instantiate().places(size, num_experts) == want


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 0.0}, r"factor must be above 0, got 0\.0"),
        ({"factor": np.nan}, "Capacity: factor must be finite, got nan"),
        ({"multiple_of": 0}, "multiple_of must be 1 or more, got 0"),
    ],
)
def test_a_capacity_without_places_is_refused(settings, message):
    """The error comes when the layer is made, not at its first evaluation."""
    p = MoELayer.Params().Set(dim=4, hidden_dim=6, num_experts=3)
    p.eval_capacity.Set(**settings)
    with pytest.raises(ValueError, match=message):
        p.Instantiate(building.Unannotated())


def test_capacity_is_not_rounded_up_by_the_noise_of_a_product():
    assert 1.1 * 100 > 110
    assert Capacity.Params().Set(factor=1.1).Instantiate().even_places(100, 10) == 11
