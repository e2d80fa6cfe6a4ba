"""How well estimated steps agree with compiled ones."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well a model's steps predict the compiled ones."""

    least_ratio: float  # Of an estimated step to the compiled one.
    greatest_ratio: float
    rank_correlation: float
    num_candidates: int


def of(steps: Sequence[tuple[float, float]]) -> Agreement:
    """Returns how well a model's steps, first in each pair, predict the compiled ones."""
    secs = np.array(steps)
    estimated = secs[:, 0]
    compiled = secs[:, 1]
    ratios = estimated / compiled

    # Spearman's correlation: it counts whether the order is right, which is what a search needs.
    ranks = secs.argsort(axis=0).argsort(axis=0)
    correlation = np.asarray(np.corrcoef(ranks.T))[0, 1]
    return Agreement(
        least_ratio=float(ratios.min()),
        greatest_ratio=float(ratios.max()),
        rank_correlation=float(correlation),
        num_candidates=len(steps),
    )
