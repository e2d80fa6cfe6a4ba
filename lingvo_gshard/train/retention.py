"""Which checkpoints stay: the newest, one every so many hours, and the best by a metric.

model_dir/checkpoints/best.json holds the best checkpoint's step, metric and value.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Mapping

from lingvo_gshard.core import atomic_file

_BEST = "best.json"
_HOUR_SECS = 3600.0


@dataclasses.dataclass(frozen=True)
class Retention:
    """How many of the newest checkpoints stay, and one every N hours if that is given."""

    keep_max: int = 5
    keep_every_n_hours: float | None = None

    def kept(self, times: Mapping[int, float], best: int | None) -> set[int]:
        """Returns the steps to keep, of those in `times` (seconds, by step).

        A clock that is set back counts as time gone by; otherwise nothing would be kept by time
        until it has caught up.
        """
        steps = sorted(times)
        stay = {step for step in steps if step == best or step in steps[-self.keep_max :]}
        if self.keep_every_n_hours is None:
            return stay
        period_secs, last = self.keep_every_n_hours * _HOUR_SECS, None
        for step in steps:
            if last is None or abs(times[step] - times[last]) >= period_secs:
                stay.add(step)
                last = step
        return stay


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far: its step, and the metric's value there."""

    step: int
    metric: str
    value: float


def read_best(folder: pathlib.Path) -> Best | None:
    """Returns what was noted in a folder of checkpoints, or None if nothing readable was."""
    path = folder / _BEST
    if not path.exists():
        return None
    try:
        return Best(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        logging.warning("%s cannot be read and counts as absent.", path)
        return None


def note_best(
    folder: pathlib.Path,
    step: int,
    metrics: Mapping[str, float],
    metric: str,
    higher_is_better: bool = False,
) -> None:
    """Notes `step` as the best if its metric beats the one noted before; NaN never does.

    Raises ValueError if the evaluation has no such metric.
    """
    if metric not in metrics:
        raise ValueError(f"best by {metric!r}: the metrics are {', '.join(sorted(metrics))}.")
    value, before = metrics[metric], read_best(folder)
    if before is not None and before.metric == metric:
        is_better = value > before.value if higher_is_better else value < before.value
    else:
        is_better = not math.isnan(value)
    if is_better:
        noted = dataclasses.asdict(Best(step, metric, value))
        atomic_file.write(folder / _BEST, json.dumps(noted))
