"""Expert load and overflow of every MoE layer, from a run's metrics."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

# Before a layer's name in the metrics' paths.
_LOAD, _OVERFLOW = "routing.load_E.", "routing.overflow."


def draw(logdir: str | pathlib.Path) -> pathlib.Path | None:
    """Writes logdir/expert_load.png: by layer, each expert's load, and the overflow over time.

    Returns:
      The picture's path; None if the model has no MoE layer or never trained here.
    """
    lines = read_lines(pathlib.Path(logdir, TRAIN_METRICS))
    layers = _layers(lines)
    if not layers:
        return None
    steps, calls = [line["step"] for line in lines], [line["metrics"] for line in lines]
    figure = Figure(figsize=(9, 4), layout="constrained")
    loads, overflows = figure.subplots(1, 2)
    last = np.array([calls[-1][_LOAD + layer] for layer in layers])
    image = loads.imshow(last, aspect="auto", vmin=0, vmax=max(2.0, last.max()), cmap="viridis")
    loads.set_yticks(range(len(layers)), layers)
    loads.set(xlabel="expert", title=f"load over its mean, step {steps[-1]}")
    figure.colorbar(image, ax=loads)
    for layer in layers:
        overflows.plot(steps, [100 * call[_OVERFLOW + layer] for call in calls], label=layer)
    overflows.set(xlabel="step", ylabel="tokens that no expert took, %", ylim=(0, None))
    overflows.legend(fontsize=7)
    path = pathlib.Path(logdir, "expert_load.png")
    figure.savefig(path, dpi=130)
    return path


def _layers(lines: list[dict[str, Any]]) -> list[str]:
    paths = lines[-1]["metrics"] if lines else {}
    return sorted(path.removeprefix(_LOAD) for path in paths if path.startswith(_LOAD))
