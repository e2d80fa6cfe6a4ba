"""What full experts cost: the tokens that are lost for each group size S and capacity C (2.2).

It simulates Algorithm 1 with experts in perfect balance: logits are independent and normal, as
those of an untrained gate are, so each expert is anybody's first or second choice with the same
probability. What overflows is then chance alone, and a gate that balances its experts less well
loses more.

G groups, S tokens of a group, E experts, C capacity of an expert in a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lingvo_gshard import registry
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.layers import moe
from lingvo_gshard.layers.gating import Capacity
from lingvo_gshard.model import placement
from lingvo_gshard.planning.tables.as_printed import FAMILY

_GROUP_SIZES = (512, 1024, 2048, 4096, 8192)  # A core has 2048 or, with 128 experts, 8192 tokens.
_MULTIPLES = (1, 4)  # The paper's 2S/E, and what Lingvo makes of it.
_TOKENS = 32_768  # Simulated for each group size.


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices of one group's tokens, before any expert is full."""

    first_S: np.ndarray  # int [S], the first expert.
    second_S: np.ndarray  # int [S], another one.
    asked_S: np.ndarray  # bool [S], whether the token asks for the second one.


@dataclasses.dataclass(frozen=True)
class Lost:
    """Shares of what found its experts full."""

    tokens: float  # Of all tokens, those that no expert took.
    first: float  # Of all first choices.
    second: float  # Of the second choices that were asked for; 0 if none was.


@dataclasses.dataclass(frozen=True)
class Row:
    """A group size and a capacity, and what they lose."""

    num_experts: int
    group_size: int
    multiple_of: int  # C is 2S/E, rounded up to a multiple of this.
    capacity: int
    random: Lost  # If second experts are asked for with probability 2 * g2, as in the paper.
    all: Lost  # If all tokens ask for their second expert.
    models: tuple[str, ...]  # The paper's models that have these sizes.

    @property
    def rows_per_token(self) -> float:
        """The rows of experts' buffers for each token, which experts compute, full or empty."""
        return self.num_experts * self.capacity / self.group_size


def rows() -> list[Row]:
    """Returns the table for the numbers of experts of the paper's family, the fewest first."""
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
    """Returns E, S and C of training in each of an experiment's stacks that have experts."""
    groups = placement.num_groups(params)
    sizes = {}
    for stack, length in params.task.cls.STACKS.items():
        if stack not in groups:
            continue
        p = params.task.Get(stack)
        rows_at_once = params.input.batch_size // max(p.microbatches, 1)
        group_size = rows_at_once * params.input.Get(length) // groups[stack]
        capacity = moe.train_places(p.moe, group_size)
        sizes[stack] = (p.moe.num_experts, group_size, capacity)
    return sizes


def random_groups(
    group_size: int, num_experts: int, num_groups: int, seed: int = 0
) -> list[Choices]:
    """Returns the choices of tokens with random gates, two or more experts; lines 2, 5, 15 to 17.

    A token asks for its second expert with probability 2 * g2.
    """
    rng = np.random.default_rng(seed)
    return [_random_choices(rng, group_size, num_experts) for _ in range(num_groups)]


def all_asking(group: Choices) -> Choices:
    """Returns the choices of the same tokens if all ask for their second expert."""
    return dataclasses.replace(group, asked_S=np.ones_like(group.asked_S))


def lost(groups: Sequence[Choices], num_experts: int, capacity: int) -> Lost:
    """Returns what is lost of some groups' choices; lines 7 to 11 and 18 to 22 of Algorithm 1.

    A choice that is not asked for takes no place.
    """
    num_tokens = 0
    num_asked = 0
    lost_tokens = 0
    lost_first = 0
    lost_second = 0

    for group in groups:
        first_kept_S = _positions(group.first_S) < capacity

        # Second choices take the places after those of all first choices.
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
    """Returns C for each multiple that gives another C than those before it."""
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
    """Returns for each element of int [n] how many before it are equal to it, int [n]."""
    by_expert = np.argsort(experts, kind="stable")
    sorted_experts = experts[by_expert]

    # In sorted order, the distance from the first element of the same expert.
    starts = np.searchsorted(sorted_experts, sorted_experts)
    positions = np.empty_like(experts)
    positions[by_expert] = np.arange(len(experts)) - starts
    return positions
