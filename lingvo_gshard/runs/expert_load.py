"""Pictures of how a run routed its tokens: the load of every expert, every statistic by layer.

L MoE layers, E experts of a layer.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lingvo_gshard.core.late import figure as mpl_figure
from lingvo_gshard.train import metrics_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metrics are named routing.FIELD.LAYER, with the fields of layers/gating.Routing.
_ROUTING = "routing."
_LOAD = "load_E"
_DEV = "dev_"  # The evaluation of dev in the language CODE is called dev_CODE.
PANELS_PER_ROW = 3
_WIDTH_INCHES = 10.0  # In a wider picture, letters are smaller on a screen.
# The title of each field, and a factor for its values. Other fields are drawn under their names.
_TITLES = {
    "overflow": ("tokens dropped by all their experts, %", 100),
    "overflow_first": ("tokens dropped by their first expert, %", 100),
    "overflow_second": ("tokens dropped by their second expert, %", 100),
    "second_dispatched": ("tokens dispatched to their second expert, %", 100),
    "dropped_choices": ("choices dropped by their expert, %", 100),
    "max_load": ("load of the busiest expert over the mean", 1),
    "idle_experts": ("experts without tokens", 1),
    "entropy": ("entropy of a token's gates, nats", 1),
    "aux_loss": ("auxiliary loss", 1),
    "router_loss": ("loss that the router adds", 1),
}


def by_layer(line: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns {layer: {field: value}} for a line of metrics, decoder_2 before decoder_11."""
    # From routing.overflow.decoder_2 to layers["decoder_2"]["overflow"].
    layers: dict[str, dict[str, Any]] = {}
    for path, value in line["metrics"].items():
        if path.startswith(_ROUTING):
            field, layer = path.removeprefix(_ROUTING).split(".", 1)
            layers.setdefault(layer, {})[field] = value
    return {layer: layers[layer] for layer in sorted(layers, key=metrics_files.stack_and_position)}


def rows(line: dict[str, Any]) -> list[list[str]]:
    """Returns a table of a line's statistics: a header, and a row for each MoE layer."""
    layers = by_layer(line)
    fields = _fields(layers)

    header = ["layer"]
    for field in fields:
        title, _ = _title(field)
        header.append(title)

    table = [header]
    for layer, values in layers.items():
        row = [layer]
        for field in fields:
            _, factor = _title(field)
            row.append(f"{factor * values.get(field, np.nan):.3g}")
        table.append(row)
    return table


def _fields(layers: dict[str, dict[str, Any]]) -> list[str]:
    """Returns all fields except the load, in the order of _TITLES, and untitled fields last."""
    present: set[str] = set().union(*layers.values()) - {_LOAD}
    titled = [field for field in _TITLES if field in present]
    return titled + sorted(present - _TITLES.keys())


def _title(field: str) -> tuple[str, int]:
    """Returns a field's title, and the factor by which its values are multiplied."""
    return _TITLES.get(field, (field, 1))


def evaluated_languages(evaluations: Iterable[dict[str, Any]]) -> list[str]:
    """Returns the languages of dev whose loads the lines of eval_metrics.jsonl have, sorted."""
    languages = set()
    for line in evaluations:
        has_loads = any(metric.startswith(f"{_LOAD}_") for metric in line)
        name = str(line.get("name", ""))
        if has_loads and name.startswith(_DEV):
            languages.add(name.removeprefix(_DEV))
    return sorted(languages)


def by_language(
    evaluations: Iterable[dict[str, Any]], codes: Iterable[str]
) -> dict[str, dict[str, list[float]]]:
    """Returns {layer: {language: load by expert}}, ordered as `codes`.

    `evaluations` are the lines of eval_metrics.jsonl; each language's last line counts. Raises
    ValueError for a load that is not a list of numbers.
    """
    # Later lines replace earlier ones.
    latest = {str(line.get("name", "")): line for line in evaluations}

    # An evaluation is named dev_CODE, and its metrics load_E_LAYER.
    layers: dict[str, dict[str, list[float]]] = {}
    for code in codes:
        for metric, value in latest.get(f"{_DEV}{code}", {}).items():
            if metric.startswith(f"{_LOAD}_"):
                if not isinstance(value, list) or not all(
                    isinstance(x, int | float) for x in value
                ):
                    raise ValueError(
                        f"{metrics_files.EVAL_METRICS}: {metric} of {code} is not a list of "
                        "numbers."
                    )
                layers.setdefault(metric.removeprefix(f"{_LOAD}_"), {})[code] = value
    return {layer: layers[layer] for layer in sorted(layers, key=metrics_files.stack_and_position)}


def draw_by_language(figure: Figure, layers: dict[str, dict[str, list[float]]]) -> None:
    """Draws the result of `by_language`: a panel for each layer, with a row for each language."""
    num_languages = max(len(loads) for loads in layers.values())
    # A row's label needs 0.17 inches; the title and the axis need the rest.
    height_inches = max(1 + 0.17 * num_languages, 2.5)
    axes = panels(figure, len(layers), height_inches)
    for panel, (layer, loads) in zip(axes, layers.items(), strict=True):
        _draw_loads(figure, panel, loads, layer)


def draw(logdir: str | pathlib.Path) -> pathlib.Path | None:
    """Writes LOGDIR/expert_load.png and returns its path, or None if no MoE layer was trained."""
    lines = metrics_files.read_lines(pathlib.Path(logdir, metrics_files.TRAIN_METRICS))
    if not lines or not by_layer(lines[-1]):
        return None

    figure = mpl_figure.Figure(layout="constrained")
    draw_on(figure, lines)
    path = pathlib.Path(logdir, "expert_load.png")
    figure.savefig(path, dpi=130)
    return path


def draw_on(figure: Figure, lines: Sequence[dict[str, Any]]) -> None:
    """Draws the last line's loads, and its other fields over all lines of train_metrics.jsonl."""
    last = lines[-1]
    layers = by_layer(last)
    fields = _fields(layers)
    load_panel, *field_panels = panels(figure, 1 + len(fields), 2.7)

    loads = {layer: values[_LOAD] for layer, values in layers.items() if _LOAD in values}
    _draw_loads(figure, load_panel, loads, f"load over its mean, step {last['step']}")

    # A panel for each field, with a curve for each layer.
    steps = [line["step"] for line in lines]
    for panel, field in zip(field_panels, fields, strict=True):
        title, factor = _title(field)
        for layer in layers:
            path = f"{_ROUTING}{field}.{layer}"  # The curve has a gap if it is missing.
            values = [factor * line["metrics"].get(path, np.nan) for line in lines]
            panel.plot(steps, values, label=layer, linewidth=1)
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylim(0, None)

    # A layer has the same color in all panels, so that one legend is enough.
    handles, labels = field_panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8)


def panels(figure: Figure, count: int, height_inches: float) -> list[Axes]:
    """Returns `count` panels, three in a row, and sets the figure's size to match."""
    num_rows = math.ceil(count / PANELS_PER_ROW)
    figure.set_size_inches(_WIDTH_INCHES, num_rows * height_inches)
    return [figure.add_subplot(num_rows, PANELS_PER_ROW, i + 1) for i in range(count)]


def _draw_loads(figure: Figure, panel: Axes, loads: dict[str, list[float]], title: str) -> None:
    """Draws a row for each entry of `loads`, with a cell for each expert."""
    # A layer with fewer experts has a shorter row, since NaN is drawn white.
    num_experts = max(len(load_E) for load_E in loads.values())
    load_LE = np.full((len(loads), num_experts), np.nan)
    for row_E, load_E in zip(load_LE, loads.values(), strict=True):
        row_E[: len(load_E)] = load_E

    # Pictures have the same scale unless a load is above twice the mean.
    largest = max(2.0, np.nanmax(load_LE))
    image = panel.imshow(load_LE, aspect="auto", vmin=0, vmax=largest, cmap="viridis")
    panel.set_yticks(range(len(loads)), list(loads), fontsize=8)
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("expert", fontsize=8)
    figure.colorbar(image, ax=panel)
