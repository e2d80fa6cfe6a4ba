"""How the tokens of a run were routed: every expert's load and every number, layer by layer."""

from __future__ import annotations

import pathlib
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lingvo_gshard.train.summaries import TRAIN_METRICS, read_lines

# Before a field of layers/gating.Routing and a layer's name in the metrics' paths.
_ROUTING = "routing."
_LOAD = "load_E"
_PANELS_A_ROW = 3
# What each field says, and by what it is multiplied; one that is not here is drawn as it is.
_PANELS = {
    "overflow": ("tokens that no expert took, %", 100),
    "overflow_first": ("tokens whose first expert was full, %", 100),
    "overflow_second": ("tokens whose second expert was full, %", 100),
    "second_dispatched": ("tokens that their second expert took, %", 100),
    "max_load": ("load of the busiest expert over the mean", 1),
    "idle_experts": ("experts with no token", 1),
    "entropy": ("entropy of a token's gates, nats", 1),
    "aux_loss": ("auxiliary loss", 1),
}


def by_layer(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{layer: {field of Routing: value}} of one call, decoder_1 before decoder_11."""
    layers: dict[str, dict[str, Any]] = {}
    for path, value in line["metrics"].items():
        if path.startswith(_ROUTING):
            field, layer = path.removeprefix(_ROUTING).split(".", 1)
            layers.setdefault(layer, {})[field] = value
    return dict(sorted(layers.items(), key=lambda item: _natural(item[0])))


def draw(logdir: str | pathlib.Path) -> pathlib.Path | None:
    """Writes logdir/expert_load.png.

    Returns:
      The picture's path; None if the model has no MoE layer or never trained here.
    """
    lines = read_lines(pathlib.Path(logdir, TRAIN_METRICS))
    if not lines or not by_layer(lines[-1]):
        return None
    figure = Figure(layout="constrained")
    draw_on(figure, lines)
    path = pathlib.Path(logdir, "expert_load.png")
    figure.savefig(path, dpi=130)
    return path


def draw_on(figure: Figure, lines: Sequence[dict[str, Any]]) -> None:
    """Draws each expert's load in the last call, and every other number over time.

    Args:
      figure: an empty one.
      lines: of train_metrics.jsonl, one or more; the last tells layers and fields.
    """
    layers = by_layer(lines[-1])
    given = {field for values in layers.values() for field in values} - {_LOAD}
    fields = [*(field for field in _PANELS if field in given), *sorted(given - _PANELS.keys())]
    num_rows = -(-(1 + len(fields)) // _PANELS_A_ROW)
    figure.set_size_inches(13, 3.2 * num_rows)
    panels = figure.subplots(num_rows, _PANELS_A_ROW, squeeze=False).flat
    loads = {layer: values[_LOAD] for layer, values in layers.items() if _LOAD in values}
    _draw_loads(figure, panels[0], loads, lines[-1]["step"])
    for panel, field in zip(panels[1:], fields, strict=False):
        _draw_field(panel, field, layers, lines)
    for panel in panels[1 + len(fields) :]:
        panel.set_axis_off()
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=7)


def _draw_loads(figure: Figure, panel: Axes, loads: dict[str, list[float]], step: int) -> None:
    """A row a layer; it ends where the layer has no more experts."""
    most = max(map(len, loads.values()))
    load_LE = np.full((len(loads), most), np.nan)
    for row, load_E in zip(load_LE, loads.values(), strict=True):
        row[: len(load_E)] = load_E
    image = panel.imshow(
        load_LE, aspect="auto", vmin=0, vmax=max(2.0, np.nanmax(load_LE)), cmap="viridis"
    )
    panel.set_yticks(range(len(loads)), list(loads), fontsize=7)
    panel.set_title(f"load over its mean, step {step}", fontsize=9)
    panel.set_xlabel("expert", fontsize=8)
    figure.colorbar(image, ax=panel)


def _draw_field(
    panel: Axes, field: str, layers: dict[str, dict[str, Any]], lines: Sequence[dict[str, Any]]
) -> None:
    """A curve a layer; where a call lacks the number, it has a gap."""
    title, factor = _PANELS.get(field, (field, 1))
    steps = [line["step"] for line in lines]
    for layer in layers:
        path = f"{_ROUTING}{field}.{layer}"
        values = [factor * line["metrics"].get(path, np.nan) for line in lines]
        panel.plot(steps, values, label=layer, linewidth=1)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("step", fontsize=8)
    panel.set_ylim(0, None)


def _natural(layer: str) -> tuple[str, int]:
    """encoder_2 before encoder_10."""
    stack = layer.rstrip(string.digits)
    return stack, int(layer.removeprefix(stack) or 0)
