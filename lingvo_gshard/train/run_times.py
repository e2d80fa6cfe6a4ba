"""How a run spent its time, over all its starts: model_dir/run_times.jsonl.

A line has `began`, the time when the process began to train, in seconds since 1970; `from_step`,
the step from which it continued; `step`; and `secs`, the seconds since `began` by category. A
process appends a line after each call, and one at its end. Lines are never dropped, so the cost of
a kill is known.
"""

import dataclasses
import enum
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.hooks import TrainCall, TrainHook
from lingvo_gshard.train.summaries import append_line
from xla_spmd.files import storage

RUN_TIMES = "run_times.jsonl"


class Category(enum.StrEnum):
    """The activities of a process that trains; LOST is time whose results had to be repeated."""

    STEPS = "training steps"
    START = "start: reading the checkpoint, tracing, compiling, the first batch"
    INPUT = "waiting for input, or for another program to be compiled"
    CHECKPOINTS = "writing checkpoints"
    EVALUATION = "evaluation"
    OTHER = "metrics and other hooks"
    LOST = "lost by restarts"


class Laps:
    """The seconds of a process by category."""

    def __init__(self, began_secs: float) -> None:
        """Counts from `began_secs`, a time.monotonic()."""
        self._last_secs = began_secs
        self.secs: dict[Category, float] = {}

    def lap(self, category: Category) -> None:
        """Counts the time since the last lap."""
        now = time.monotonic()
        self.secs[category] = self.secs.get(category, 0.0) + now - self._last_secs
        self._last_secs = now


class TimesLog(TrainHook):
    """Appends lines to run_times.jsonl."""

    def __init__(self, model_dir: str | pathlib.Path, laps: Laps) -> None:
        self._path = pathlib.Path(model_dir) / RUN_TIMES
        self._laps = laps
        self._began: float | None = None  # None if training did not begin.
        self._step = 0
        self._from_step = 0

    def begin(self, step: int) -> None:
        self._began = time.time()
        self._from_step = step
        self._step = step

    def after_call(self, call: TrainCall) -> None:
        self._step = call.step
        self._append()

    def after_save(self, step: int, state: NestedMap) -> None:
        storage.publish(self._path)

    def end(self) -> None:
        if self._began is not None:
            self._append()
            storage.publish(self._path)

    def _append(self) -> None:
        secs = {category.name: round(value, 3) for category, value in self._laps.secs.items()}
        line = {
            "began": self._began,
            "from_step": self._from_step,
            "step": self._step,
            "secs": secs,
        }
        append_line(self._path, line)


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The seconds of all processes that trained a run, by category."""

    secs: Mapping[Category, float]

    @property
    def total_secs(self) -> float:
        """The time of all categories, without the time between two processes."""
        return sum(self.secs.values())

    @property
    def share(self) -> float:
        """The share of the time that went to steps which were not repeated."""
        return self.secs.get(Category.STEPS, 0.0) / self.total_secs


def goodput(lines: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """Returns the sum of the lines of run_times.jsonl; None if their time is 0."""
    processes: dict[float, list[Mapping[str, Any]]] = {}
    for line in lines:
        processes.setdefault(line["began"], []).append(line)

    totals = dict.fromkeys(Category, 0.0)
    kept_to: float = float("inf")
    # From the last process to the first: the steps that a later process repeated are lost.
    for began in sorted(processes, reverse=True):
        of_process = processes[began]
        kept = [line for line in of_process if line["step"] <= kept_to]
        kept_secs = kept[-1]["secs"] if kept else {}
        for name, secs in kept_secs.items():
            totals[Category[name]] += secs
        totals[Category.LOST] += sum(of_process[-1]["secs"].values()) - sum(kept_secs.values())
        kept_to = min(kept_to, of_process[-1]["from_step"])

    result = Goodput(totals)
    return result if result.total_secs > 0.0 else None
