"""The experts of a layer that remain when a model is pruned for some languages, and their weights.

The remaining experts are the ones that tokens choose most often, in the mean over the languages
(Koishekenov et al., 2023, arXiv:2212.09811, whose top-1 activity counts only first choices). The
other experts are dropped, or merged as in M-SMoE (Li et al., 2024, arXiv:2310.01334): into the
remaining expert with the most similar gate, weighted by how often each is chosen. This differs from
M-SMoE in three ways: gates are compared by their weights, which needs no text; hidden units are not
permuted to match; and a token that would choose a dropped expert is not sent to the merged one.

E experts of the layer, K remaining experts, M model.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

_SMALLEST_NORM = 1e-30


@dataclasses.dataclass(frozen=True)
class KeptExperts:
    """The remaining experts of one layer."""

    ids: tuple[int, ...]  # The experts' old numbers, in increasing order.
    # Each remaining expert is a mean: the experts of the mean, and their weights, whose sum is 1.
    members: tuple[tuple[tuple[int, float], ...], ...]
    share: float  # The share of all choices that fell on the remaining experts.


def num_kept(num_experts: int, keep: float, num_choices: int, multiple_of: int = 1) -> int:
    """Returns K: the share `keep` of E, rounded up to a multiple of `multiple_of`.

    It is at least `num_choices`, the experts of a token, and at most E. Raises ValueError if `keep`
    is not in (0, 1], or if E is not a multiple of `multiple_of`.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}: expected a share above 0 and up to 1.")
    if multiple_of < 1 or num_experts % multiple_of:
        raise ValueError(
            f"multiple_of={multiple_of}: expected a divisor of the {num_experts} experts."
        )

    # Rounded first, so that 0.07 of 100 is 7 and not 8.
    wanted = max(round(keep * num_experts, 9), min(num_choices, num_experts))
    return multiple_of * math.ceil(wanted / multiple_of)


def shares(loads: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Returns the share of all choices that falls on each expert, float64 [E]; their sum is 1.

    `loads` has each expert's load, relative to the mean load, by language. All languages have the
    same weight.
    """
    load_LE = np.array(list(loads.values()), np.float64)
    return np.mean(load_LE, axis=0) / load_LE.shape[1]


def busiest(share_E: np.ndarray, count: int) -> KeptExperts:
    """Returns the `count` experts with the largest shares, unchanged; lower ids win ties."""
    order = np.argsort(-share_E, kind="stable")
    ids = tuple(sorted(order[:count].tolist()))
    return KeptExperts(
        ids, members=tuple(((i, 1.0),) for i in ids), share=float(share_E[list(ids)].sum())
    )


def merged(share_E: np.ndarray, count: int, wg_ME: np.ndarray) -> KeptExperts:
    """Returns the experts of `busiest`, each merged with the dropped experts most similar to it.

    The similarity is the cosine of two columns of the gate `wg_ME`; lower ids win ties. Experts are
    weighted by their shares. If nobody chose a group's experts, the remaining one is unchanged.
    """
    kept = busiest(share_E, count)
    norm_E = np.linalg.norm(wg_ME.astype(np.float64), axis=0)
    unit_ME = wg_ME / np.maximum(norm_E, _SMALLEST_NORM)
    cosine_KE = unit_ME[:, list(kept.ids)].T @ unit_ME

    groups: list[list[int]] = [[i] for i in kept.ids]
    for expert in range(len(share_E)):
        if expert not in kept.ids:
            nearest = int(np.argmax(cosine_KE[:, expert]))
            groups[nearest].append(expert)

    members = tuple(_weighted(group, share_E) for group in groups)
    return dataclasses.replace(kept, members=members)


def _weighted(group: Sequence[int], share_E: np.ndarray) -> tuple[tuple[int, float], ...]:
    """Returns the experts of a group, whose first one remains, with their shares within it."""
    total = float(share_E[list(group)].sum())
    if not total:
        return ((group[0], 1.0),)
    return tuple((i, float(share_E[i]) / total) for i in group if share_E[i])
