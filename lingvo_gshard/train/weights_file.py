"""Exported weights: one safetensors file with the arrays' dotted paths as names.

A name is, for example, theta.encoder.layers[1].feed_forward.wi.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping

import numpy as np

from lingvo_gshard.core import safetensors_file, table
from lingvo_gshard.core.safetensors_file import ArrayLike

_FORMAT = "lingvo_gshard weights 1"


def write(path: str | pathlib.Path, weights: Mapping[str, ArrayLike], step: int) -> None:
    """Writes the weights after `step` steps, one array at a time."""
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
    weights, metadata = safetensors_file.read(path), safetensors_file.read_metadata(path)
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: another program's file: its format is {metadata.get('format')!r}, "
            f"not {_FORMAT!r}; it holds {', '.join(sorted(weights)[:3]) or 'nothing'}, ..."
        )
    try:
        digests = dict(json.loads(metadata["sha256"]))
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: damaged: it has no readable digests ({error!r}).") from error
    for name in sorted(digests.keys() | weights.keys()):
        if name not in weights or digests.get(name) != safetensors_file.sha256(weights[name]):
            raise ValueError(f"{path}: damaged: {name} is not what was written.")
    return weights


def summary(weights: Mapping[str, ArrayLike]) -> str:
    """Returns a line for each array, sorted by name, and one with the totals."""
    rows = [(name, f"{x.dtype}{list(x.shape)}") for name, x in sorted(weights.items())]
    total = sum(math.prod(x.shape) for x in weights.values())
    return "\n".join([table.text(rows), f"{len(weights)} tensors, {total:,} weights"])
