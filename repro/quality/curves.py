"""The tokens that runs need to reach a loss: the paper's measure of sample efficiency (Table 2)."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.model import flops
from lingvo_gshard.runs import loss_products
from lingvo_gshard.train.metrics_files import TRAIN_METRICS, read_lines
from xla_spmd.files import table

# A loss is the mean over this many steps, because batches differ more than models.
WINDOW_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Curve:
    """A run's training cross entropy, without the auxiliary loss and label smoothing."""

    tokens: tuple[float, ...]  # Target tokens seen, rising.
    nll: tuple[float, ...]  # Nats per token, the mean over the window that ends there.

    def tokens_to(self, nll: float) -> float | None:
        """Returns the tokens seen when the loss was first `nll` or less, or None if never."""
        points = zip(self.tokens, self.nll, strict=True)
        return next((tokens for tokens, loss in points if loss <= nll), None)


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of one model, one for each seed, and its flops per target token."""

    name: str
    flops_per_token: float
    curves: tuple[Curve, ...]


def read(logdir: str | pathlib.Path, steps: float = math.inf) -> Curve:
    """Reads the curve of a run's first `steps` steps, with one point per call after a full window.

    Raises ValueError if the run is shorter than a window.
    """
    tokens = 0.0
    points = []
    window = []
    for line in read_lines(pathlib.Path(logdir, TRAIN_METRICS)):
        if line["step"] > steps:
            break
        metrics = line["metrics"]
        count = line["num_steps"]
        tokens += metrics["num_tokens"] * count
        window.append((count, metrics["nll"]))

        # The window is shortened to as few calls as have enough steps.
        while sum(count for count, _ in window[1:]) >= WINDOW_STEPS:
            window.pop(0)
        steps_in_window = sum(count for count, _ in window)
        if steps_in_window >= WINDOW_STEPS:
            mean = sum(count * nll for count, nll in window) / steps_in_window
            points.append((tokens, mean))

    if not points:
        raise ValueError(f"{logdir}: fewer than {WINDOW_STEPS} steps of training.")
    return Curve(*(tuple(column) for column in zip(*points, strict=True)))


def text(
    baseline: Runs, others: Sequence[Runs], shares: Sequence[float] = (0.25, 0.5, 0.75, 1.0)
) -> str:
    """Returns a table of the tokens that each run needs to reach the baseline's losses.

    The columns are the losses that the baseline's run with the same seed has after `shares` of its
    tokens. A cell has the millions of tokens, and their ratio to the baseline's; if the run never
    reaches the loss, its lowest loss.
    """
    rows = [("model", "MFLOP/token", "seed", *(f"loss at {share:.0%}" for share in shares))]
    for runs in (baseline, *others):
        mflop = f"{runs.flops_per_token / 1e6:.2f}"
        for seed, (curve, base) in enumerate(zip(runs.curves, baseline.curves, strict=True), 1):
            cells = (_cell(curve, base, share) for share in shares)
            rows.append((runs.name, mflop, str(seed), *cells))
    return table.text(rows)


def _cell(curve: Curve, base: Curve, share: float) -> str:
    index = max(round(share * len(base.nll)) - 1, 0)
    # Losses rise and fall, so the baseline may have reached this one earlier.
    first = base.tokens_to(base.nll[index])
    needed = curve.tokens_to(base.nll[index])
    if needed is None or first is None:
        return f"- ({min(curve.nll):.2f})"
    return f"{needed / 1e6:.2f}M ({needed / first:.2f})"


def flops_per_token(params: Params) -> float:
    """Returns the flops of a training step on full rows, per target token."""
    p = params.input
    step_flops = flops.step_flops(loss_products.of_experiment(params))
    return step_flops / (p.batch_size * p.target_len)
