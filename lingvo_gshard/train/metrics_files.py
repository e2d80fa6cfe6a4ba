"""A run's files of metrics, with a JSON object per line; read without JAX."""

import pathlib
from typing import Any

from xla_spmd.files import json_records

TRAIN_METRICS = "train_metrics.jsonl"  # A line for each call; see summaries.MetricsLog.
EVAL_METRICS = "eval_metrics.jsonl"  # A line for each evaluation; see summaries.write_evaluation.


def stack_and_position(layer: str) -> tuple[str, int]:
    """Returns ("encoder", 1) for encoder_1; a layer without an index is a stack by itself."""
    stack, _, index = layer.rpartition("_")
    return (stack, int(index)) if index.isdigit() else (layer, 0)


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns a file's JSON lines, [] if the file is missing. An incomplete last line is left out.

    Raises ValueError if a line is damaged.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    try:
        return [dict(json_records.parse(line)) for line in lines if line.endswith(b"\n")]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; delete the line, or the file.") from error
