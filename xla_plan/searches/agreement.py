"""The agreement of estimated steps with compiled ones."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How well a model's steps predict the compiled ones."""

    least_ratio: float  # The ratio of an estimated step to the compiled one.
    greatest_ratio: float
    rank_correlation: float | None  # None if either has the same step for all candidates.
    num_candidates: int


def of(steps: Sequence[tuple[float, float]]) -> Agreement:
    """Returns the agreement of a model's steps, first in each pair, with the compiled ones."""
    secs = np.array(steps)
    estimated = secs[:, 0]
    compiled = secs[:, 1]
    ratios = estimated / compiled

    # Spearman's correlation: it counts whether the order is right, as a search needs it.
    # Equal steps share the mean of their ranks, so that their order in `steps` does not count.
    estimated_ranks = _ranks(estimated)
    compiled_ranks = _ranks(compiled)
    correlation = None
    if np.ptp(estimated_ranks) > 0 and np.ptp(compiled_ranks) > 0:
        correlation = float(np.corrcoef(estimated_ranks, compiled_ranks)[0, 1])

    return Agreement(
        least_ratio=float(ratios.min()),
        greatest_ratio=float(ratios.max()),
        rank_correlation=correlation,
        num_candidates=len(steps),
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns the rank of each value from 0, float [n]; equal values share their mean rank."""
    num_less = (values < values[:, None]).sum(axis=1)
    num_equal = (values == values[:, None]).sum(axis=1)
    return num_less + (num_equal - 1) / 2
