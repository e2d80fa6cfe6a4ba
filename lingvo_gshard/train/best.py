"""The best checkpoint by a metric of its evaluation: model_dir/checkpoints/best.json."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import math
import pathlib
from collections.abc import Mapping

from lingvo_gshard.core import atomic_file

_FILE = "best.json"


class Better(enum.Enum):
    """Which value of a metric is the better one."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclasses.dataclass(frozen=True)
class BestBy:
    """The metric of an evaluation that tells which checkpoint is the best."""

    metric: str
    better: Better = Better.LOWER


@dataclasses.dataclass(frozen=True)
class Best:
    """The best checkpoint so far: its step, and the metric's value there."""

    step: int
    metric: str
    value: float


def read(folder: pathlib.Path) -> Best | None:
    """What was noted in a folder of checkpoints; None if nothing was, or it can't be read."""
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        return Best(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        logging.warning("%s can't be read and counts as absent.", path)
        return None


def note(folder: pathlib.Path, by: BestBy, step: int, metrics: Mapping[str, float]) -> None:
    """Notes `step` as the best if its metric is better than the one that was noted before.

    One that is no number is never the best.

    Raises:
      ValueError: the evaluation has no such metric.
    """
    if by.metric not in metrics:
        raise ValueError(f"best by {by.metric!r}: the metrics are {', '.join(sorted(metrics))}.")
    value, before = metrics[by.metric], read(folder)
    if math.isnan(value):
        return
    if before is not None and before.metric == by.metric and not _is_better(by, value, before):
        return
    noted = dataclasses.asdict(Best(step, by.metric, value))
    atomic_file.write(folder / _FILE, json.dumps(noted))


def _is_better(by: BestBy, value: float, before: Best) -> bool:
    return value < before.value if by.better is Better.LOWER else value > before.value
