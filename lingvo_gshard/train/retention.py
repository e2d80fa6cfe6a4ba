"""Which checkpoints stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

_HOUR_SECS = 3600.0


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay on disk; the best one by a metric always does.

    Attributes:
      keep_max: the newest.
      keep_every_n_hours: one for every so many hours of training, besides; None for none.

    Raises:
      ValueError: a number that is too small.
    """

    keep_max: int = 5
    keep_every_n_hours: float | None = None

    def __post_init__(self) -> None:
        if self.keep_max < 1:
            raise ValueError(f"Retention: keep_max must be 1 or more, got {self.keep_max}.")
        if self.keep_every_n_hours is not None and self.keep_every_n_hours <= 0:
            raise ValueError(
                f"Retention: keep_every_n_hours must be more than 0, got {self.keep_every_n_hours}."
            )

    def kept(self, times: Mapping[int, float], best: int | None) -> set[int]:
        """The steps to keep, of those in `times` (seconds, by step).

        A clock that jumps back counts as time gone by, so that keeping never pauses for long.
        """
        steps = sorted(times)
        stay = {step for step in steps if step == best or step in steps[-self.keep_max :]}
        if self.keep_every_n_hours is None or not steps:
            return stay
        last = steps[0]
        stay.add(last)
        for step in steps[1:]:
            if abs(times[step] - times[last]) >= self.keep_every_n_hours * _HOUR_SECS:
                stay.add(step)
                last = step
        return stay
