"""The cost of full experts: the tokens that are dropped, by group size S and capacity C (2.2).

It simulates Algorithm 1 with experts in perfect balance: logits are independent and normal, as in
an untrained gate, so each expert is a token's first or second choice with the same probability. The
overflow is then pure chance, and a gate that balances its experts less well drops more.

G groups, S tokens per group, E experts, C capacity of an expert in a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers import moe_sizes
from lingvo_gshard.layers.gating import Capacity
from lingvo_gshard.model import placement
from repro.tables.as_printed import FAMILY

_GROUP_SIZES = (512, 1024, 2048, 4096, 8192)  # A core has 2048 or, with 128 experts, 8192 tokens.
_MULTIPLES = (1, 4)  # The paper's 2S/E, and Lingvo's rounding of it.
_TOKENS = 32_768  # The number of tokens simulated for each group size.


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices of one group's tokens, before any expert is full."""

    first_S: np.ndarray  # int [S], the first expert.
    second_S: np.ndarray  # int [S], the second expert, another one.
    asked_S: np.ndarray  # bool [S], whether the token requests the second expert.


@dataclasses.dataclass(frozen=True)
class Lost:
    """The shares of tokens and choices that found their experts full."""

    tokens: float  # The share of tokens that no expert took.
    first: float  # The lost share of all first choices.
    second: float  # The lost share of the requested second choices, or 0.


@dataclasses.dataclass(frozen=True)
class Row:
    """A group size and a capacity, and the resulting losses."""

    num_experts: int
    group_size: int
    multiple_of: int  # C is 2S/E, rounded up to a multiple of this.
    capacity: int
    random: Lost  # Second experts are requested with probability 2 * g2, as in the paper.
    all: Lost  # All tokens request their second expert.
    models: tuple[str, ...]  # The paper's models with these sizes.

    @property
    def rows_per_token(self) -> float:
        """The rows in experts' buffers per token; experts compute them, full or empty."""
        return self.num_experts * self.capacity / self.group_size


def rows() -> list[Row]:
    """Returns the table for the paper family's numbers of experts, in increasing order."""
    models_by_sizes: dict[tuple[int, int, int], list[str]] = {}
    for run in FAMILY:
        for sizes in sorted(set(sizes_of(registry.get_params(run.model)).values())):
            models_by_sizes.setdefault(sizes, []).append(run.model)

    table: list[Row] = []
    for num_experts in sorted({experts for experts, _, _ in models_by_sizes}):
        for group_size in _GROUP_SIZES:
            groups = random_groups(group_size, num_experts, _TOKENS // group_size)
            for multiple_of, capacity in _capacities(group_size, num_experts).items():
                models = models_by_sizes.get((num_experts, group_size, capacity), ())
                row = Row(
                    num_experts=num_experts,
                    group_size=group_size,
                    multiple_of=multiple_of,
                    capacity=capacity,
                    random=lost(groups, num_experts, capacity),
                    all=lost(list(map(all_asking, groups)), num_experts, capacity),
                    models=tuple(models),
                )
                table.append(row)
    return table


def sizes_of(params: Params) -> dict[str, tuple[int, int, int]]:
    """Returns E, S and C in training for each stack of an experiment that has experts."""
    groups = placement.num_groups(params)
    sizes = {}
    for stack, length in params.task.cls.STACKS.items():
        if stack not in groups:
            continue
        p = params.task.Get(stack)
        rows_at_once = params.input.batch_size // max(p.microbatches, 1)
        group_size = rows_at_once * params.input.Get(length) // groups[stack]
        capacity = moe_sizes.train_places(p.moe, group_size)
        sizes[stack] = (p.moe.num_experts, group_size, capacity)
    return sizes


def random_groups(
    group_size: int, num_experts: int, num_groups: int, seed: int = 0
) -> list[Choices]:
    """Returns the choices of tokens with random gates, two or more experts; lines 2, 5, 15 to 17.

    A token requests its second expert with probability 2 * g2.
    """
    rng = np.random.default_rng(seed)
    return [_random_choices(rng, group_size, num_experts) for _ in range(num_groups)]


def all_asking(group: Choices) -> Choices:
    """Returns the choices of the same tokens if all request their second expert."""
    return dataclasses.replace(group, asked_S=np.ones_like(group.asked_S))


def lost(groups: Sequence[Choices], num_experts: int, capacity: int) -> Lost:
    """Returns the lost shares of some groups' choices; lines 7 to 11, 18 to 22 of Algorithm 1.

    A choice that is not requested does not take a slot.
    """
    num_tokens = 0
    num_asked = 0
    lost_tokens = 0
    lost_first = 0
    lost_second = 0

    for group in groups:
        first_kept_S = _positions(group.first_S) < capacity

        # Second choices take the slots after all first choices.
        asked_second = group.second_S[group.asked_S]
        count_E = np.bincount(group.first_S, minlength=num_experts)
        second_kept = count_E[asked_second] + _positions(asked_second) < capacity
        second_kept_S = np.zeros_like(first_kept_S)
        second_kept_S[group.asked_S] = second_kept

        num_tokens += len(first_kept_S)
        num_asked += len(second_kept)
        lost_tokens += int(np.count_nonzero(~first_kept_S & ~second_kept_S))
        lost_first += int(np.count_nonzero(~first_kept_S))
        lost_second += int(np.count_nonzero(~second_kept))

    return Lost(lost_tokens / num_tokens, lost_first / num_tokens, lost_second / max(num_asked, 1))


def _capacities(group_size: int, num_experts: int) -> dict[int, int]:
    """Returns C for each multiple, except multiples that give an earlier multiple's C."""
    capacities: dict[int, int] = {}
    for multiple_of in _MULTIPLES:
        p = Capacity.Params().Set(multiple_of=multiple_of)
        capacity = p.Instantiate().places(group_size, num_experts)
        if capacity not in capacities.values():
            capacities[multiple_of] = capacity
    return capacities


def _random_choices(rng: np.random.Generator, group_size: int, num_experts: int) -> Choices:
    logits_SE = rng.standard_normal((group_size, num_experts), dtype=np.float32)
    tokens_S = np.arange(group_size)

    first_S = logits_SE.argmax(1)
    first_logit_S = logits_SE[tokens_S, first_S]
    logits_SE[tokens_S, first_S] = -np.inf
    second_S = logits_SE.argmax(1)
    second_logit_S = logits_SE[tokens_S, second_S]

    # g2 / (g1 + g2) of line 16, in which the softmax's denominator cancels out.
    g2_S = 1.0 / (1.0 + np.exp(first_logit_S - second_logit_S))
    asked_S = 2.0 * g2_S > rng.random(group_size)
    return Choices(first_S, second_S, asked_S)


def _positions(experts: np.ndarray) -> np.ndarray:
    """Returns, for each element of int [n], how many earlier elements are equal to it, int [n]."""
    by_expert = np.argsort(experts, kind="stable")
    sorted_experts = experts[by_expert]

    # In sorted order, the distance from the first element of the same expert.
    starts = np.searchsorted(sorted_experts, sorted_experts)
    positions = np.empty_like(experts)
    positions[by_expert] = np.arange(len(experts)) - starts
    return positions
