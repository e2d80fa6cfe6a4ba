"""Exported weights: a safetensors file whose names are the state's dotted paths.

A name is, for example, theta.encoder.layers[1].feed_forward.wi.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_gshard.core import safetensors_file, table

_FORMAT = "lingvo_gshard weights 1"


def write(path: str | pathlib.Path, weights: Mapping[str, Any], step: int) -> None:
    """Writes the weights after `step` steps, one at a time; see safetensors_file.write."""
    safetensors_file.write(path, weights, {"format": _FORMAT, "step": str(step)})


def read(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write` wrote, mapped from the file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a safetensors file, is cut short, was written by another program, or
        an array is not what was written.
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    found = safetensors_file.read(path)
    weights, file_format = found.arrays, found.metadata.get("format")
    if file_format != _FORMAT:
        raise ValueError(
            f"{path}: another program's file: its format is {file_format!r}, not {_FORMAT!r}; it "
            f"holds {', '.join(sorted(weights)[:3]) or 'nothing'}, ..."
        )
    digests = json.loads(found.metadata.get("sha256", "{}"))
    for name in sorted(digests.keys() | weights.keys()):
        if name not in weights or digests.get(name) != safetensors_file.sha256(weights[name]):
            raise ValueError(f"{path}: damaged: {name} is not what was written.")
    return weights


def summary(weights: Mapping[str, Any]) -> str:
    """Returns a line for each array, sorted by name, and one with the totals."""
    rows = [(name, f"{x.dtype}{list(x.shape)}") for name, x in sorted(weights.items())]
    total = sum(math.prod(x.shape) for x in weights.values())
    return "\n".join([table.text(rows), f"{len(weights)} tensors, {total:,} weights"])
