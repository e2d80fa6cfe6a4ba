"""Tokens to a training loss (the paper's Table 2), from runs' train_metrics.jsonl."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

# A loss is the mean over so many steps: batches differ by more than two models do.
WINDOW_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Curve:
    """A run's training cross-entropy, the auxiliary loss and label smoothing apart.

    Attributes:
      tokens: target tokens seen, rising.
      nll: nats a token, the mean over the WINDOW_STEPS before.
    """

    tokens: tuple[float, ...]
    nll: tuple[float, ...]

    def tokens_to(self, nll: float) -> float | None:
        """Tokens seen when the loss was first at or below `nll`; None if it never was."""
        reached = (
            tokens for tokens, loss in zip(self.tokens, self.nll, strict=True) if loss <= nll
        )
        return next(reached, None)


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of one model, one a seed, and what a token costs it."""

    name: str
    flops_per_token: float
    curves: tuple[Curve, ...]


def read_curve(logdir: str | pathlib.Path) -> Curve:
    """The curve of a run's folder, a point a call from the first full window on.

    Raises:
      ValueError: the run is shorter than a window.
    """
    tokens, points, window = 0.0, [], []
    for line in read_lines(pathlib.Path(logdir, TRAIN_METRICS)):
        metrics, steps = line["metrics"], line["num_steps"]
        tokens += metrics["num_tokens"] * steps
        window.append((steps, metrics["nll"]))
        while sum(count for count, _ in window[1:]) >= WINDOW_STEPS:
            window.pop(0)
        steps_in_window = sum(count for count, _ in window)
        if steps_in_window >= WINDOW_STEPS:
            mean = sum(count * nll for count, nll in window) / steps_in_window
            points.append((tokens, mean))
    if not points:
        raise ValueError(f"{logdir}: fewer than {WINDOW_STEPS} steps of training.")
    return Curve(*(tuple(column) for column in zip(*points, strict=True)))


def table(baseline: Runs, others: Sequence[Runs], shares: Sequence[float]) -> str:
    """Millions of tokens that each run takes to the baseline's losses, and their ratio to its own.

    The columns are the losses that the baseline's run of the same seed has after `shares` of its
    tokens. A loss that a run never reaches shows the lowest that it did.
    """
    head = "".join(f"{f'loss at {share:.0%}':>16}" for share in shares)
    lines = [f"{'model':<14}{'MFLOP/token':>12}{'seed':>6}{head}"]
    for runs in (baseline, *others):
        for seed, (curve, base) in enumerate(zip(runs.curves, baseline.curves, strict=True), 1):
            cells = "".join(f"{_cell(curve, base, share):>16}" for share in shares)
            flops = f"{runs.flops_per_token / 1e6:.2f}"
            lines.append(f"{runs.name:<14}{flops:>12}{seed:>6}{cells}")
    return "\n".join(lines)


def _cell(curve: Curve, base: Curve, share: float) -> str:
    index = max(round(share * len(base.nll)) - 1, 0)
    # Losses rise and fall: a loss is reached when it first is.
    first = base.tokens_to(base.nll[index])
    needed = curve.tokens_to(base.nll[index])
    if needed is None or first is None:
        return f"- ({min(curve.nll):.2f})"
    return f"{needed / 1e6:.2f}M ({needed / first:.2f})"
