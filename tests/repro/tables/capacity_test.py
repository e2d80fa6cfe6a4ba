"""The simulation of full experts, compared with a literal loop over Algorithm 1.

G groups, S tokens per group, E experts, C capacity.
"""

import numpy as np
import pytest

from lingvo_gshard import registry
from repro.tables import capacity
from repro.tables.capacity import Choices, Lost

S = 23
E = 5


def _random_groups(seed):
    """Returns uneven choices of three groups; about a third request no second expert."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(3):
        first_S = rng.choice(E, S, p=[0.4, 0.3, 0.1, 0.1, 0.1])
        second_S = (first_S + rng.integers(1, E, S)) % E
        groups.append(Choices(first_S, second_S, rng.random(S) < 0.7))
    return groups


def _literal(groups, places):
    """Runs Algorithm 1 line by line; a choice that is not requested is not counted."""
    tokens = 0
    asked = 0
    lost_first = 0
    lost_second = 0
    lost_tokens = 0
    for group in groups:
        c_E = [0] * E  # line 1
        kept_S = [False] * S
        for s in range(S):  # line 4
            e1 = group.first_S[s]
            c = c_E[e1]  # line 7
            if c < places:  # line 8
                kept_S[s] = True
            else:
                lost_first += 1
            c_E[e1] = c + 1  # line 11
        for s in range(S):  # line 14
            if group.asked_S[s]:
                asked += 1
                e2 = group.second_S[s]
                c = c_E[e2]  # line 18
                if c < places:  # line 19
                    kept_S[s] = True
                else:
                    lost_second += 1
                c_E[e2] = c + 1  # line 22
        tokens += S
        lost_tokens += S - sum(kept_S)
    return Lost(lost_tokens / tokens, lost_first / tokens, lost_second / asked)


@pytest.mark.parametrize("places", [1, 3, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_lost_tokens_equal_a_literal_loop(places, seed):
    groups = _random_groups(seed)
    want = _literal(groups, places)
    assert want.tokens > 0
    assert capacity.lost(groups, E, places) == want


def test_without_second_choices_no_second_choice_is_lost():
    group = Choices(np.array([0, 0, 1]), np.array([1, 1, 0]), np.zeros(3, bool))
    assert capacity.lost([group], 2, 1) == Lost(tokens=1 / 3, first=1 / 3, second=0.0)


def test_random_gates_are_balanced_and_request_second_experts_by_their_gates():
    """With two normal logits, 2 * g2 is 2 / (1 + exp(d)), where d is |N(0, 2)|."""
    groups = capacity.random_groups(10_000, 2, 4)
    first = np.concatenate([group.first_S for group in groups])
    second = np.concatenate([group.second_S for group in groups])
    np.testing.assert_array_equal(first + second, 1)
    assert np.mean(first) == pytest.approx(0.5, abs=0.01)

    gap = np.linspace(0, 12, 20_001)
    density = np.exp(-(gap**2) / 4) / np.sqrt(np.pi)
    want = np.trapezoid(density * 2 / (1 + np.exp(gap)), gap)
    asked = np.concatenate([group.asked_S for group in groups])
    assert np.mean(asked) == pytest.approx(want, abs=0.01)


def test_sizes_are_those_of_each_stack_and_of_a_microbatch():
    settings = [
        "input.batch_size=64",
        "task.decoder.moe.group_size=64",
        "task.decoder.moe.num_experts=32",
        "task.decoder.moe.train_capacity.multiple_of=4",
        "task.encoder.moe.group_size=None",
        "task.encoder.layers_as=LOOP",
        "task.encoder.num_layers=4",
        "task.encoder.stages=2",
        "task.encoder.microbatches=32",
    ]
    params = registry.get_params("toy.MoE8E4L", settings)
    # Two rows of 64 tokens: 32 is the largest divisor of 128 up to 512 / 10.
    assert capacity.sizes_of(params) == {"encoder": (8, 32, 8), "decoder": (32, 64, 4)}
