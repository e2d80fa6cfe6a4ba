"""How many groups an MoE layer divides a batch into, and how many places its experts have for each.

B batch, L length, G groups, S tokens of a group, E experts, C capacity, M model, H hidden: the
letters of sharding/layout.py. `p` are the Params of an MoELayer.
"""

from __future__ import annotations

import math

from lingvo_gshard.core.hyperparams import AnyParams
from lingvo_gshard.layers.gating import CapacityBy
from lingvo_gshard.sharding.annotator import Annotator


def num_choices(p: AnyParams) -> int:
    """Returns k, the experts that a token chooses, without the shared ones."""
    return p.gating.cls.num_choices(p.gating)


def train_places(p: AnyParams, group_size: int) -> int:
    """Returns C when training, the places of an expert in a group of `group_size` tokens."""
    return p.train_capacity.Instantiate().places(group_size, p.num_experts, num_choices(p))


def group_size(p: AnyParams, tokens: int) -> int:
    """Returns S for a batch of `tokens` tokens with padding: p.group_size if set, or a default."""
    return default_group_size(p, tokens) if p.group_size is None else p.group_size


def default_group_size(p: AnyParams, tokens: int) -> int:
    """Returns S for `tokens` tokens, a divisor of them, so that dispatch and overflow cost little.

    Experts that have few places for a group overflow even in perfect balance: with one place they
    lose 12 % of all tokens, with four 2 % (repro/tables/capacity.py). So groups may be larger
    than cheap_group_size, up to C = 4, as long as there are as many groups as experts, so that
    devices with one expert each also have a group each (section 3.1: G and E are O(D)).

    S does not depend on the number of devices, and neither do the results. A group size that is set
    takes the place of this one.
    """
    # As large as both bounds allow, but not below the size at which dispatch is cheap.
    four_places = 4 * _one_place(p)
    one_group_an_expert = tokens / p.num_experts
    return _largest_divisor(tokens, max(_cheap(p), min(four_places, one_group_an_expert)))


def cheap_group_size(p: AnyParams, tokens: int) -> int:
    """Returns S for `tokens` tokens, a divisor of them, so that dispatch costs little.

    Per token, dispatch and combine by einsum take 4 * E * C * M flops, and the experts take
    (E * C / S) * 4 * M * H: the former are S / H of the latter. So S is the largest divisor of
    `tokens` that is at most H / 10. With so many experts that C would be below 1, and be rounded
    up, S is the largest divisor that is at most E / factor.
    """
    return _largest_divisor(tokens, _cheap(p))


def _cheap(p: AnyParams) -> float:
    # At least 1, where H is below 10.
    return max(1.0, p.hidden_dim / 10, _one_place(p))


def _one_place(p: AnyParams) -> float:
    """Returns the number of tokens in a group of which each expert takes one: C = 1."""
    return p.num_experts / p.train_capacity.Instantiate().factor(num_choices(p))


def _largest_divisor(tokens: int, most: float) -> int:
    sizes = range(1, min(tokens, int(most)) + 1)
    return max(size for size in sizes if tokens % size == 0)


def num_groups(p: AnyParams, name: str, batch: int, length: int) -> int:
    """Returns G for a batch [B, L].

    Raises ValueError if S, called `name`, does not divide its tokens.
    """
    tokens = batch * length
    if tokens < 1:
        raise ValueError(f"{name}: a batch of {batch} rows of {length} tokens has no groups.")

    size = group_size(p, tokens)
    if size < 1 or tokens % size:
        raise ValueError(
            f"{name} {size} does not divide the batch's {tokens} tokens "
            f"({batch} x {length}); choose a divisor."
        )
    return tokens // size


def num_decoded_groups(p: AnyParams, batch: int, length: int, annotator: Annotator) -> int:
    """Returns G for a batch [B, L] of decoding, which may be a single step."""
    if p.eval_capacity.by is not CapacityBy.TOKENS:
        return batch  # So that no example takes the places of another.

    # Enough groups for all partitions, as far as these divide the batch.
    (num_partitions,) = annotator.factor("G")
    num_parts = math.gcd(batch, num_partitions)
    tokens = batch * length
    return tokens // cheap_group_size(p, tokens // num_parts)
