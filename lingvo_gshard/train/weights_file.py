"""Weights in one safetensors file, for other programs and for keeping.

Names are the state's dotted paths, such as theta.encoder.layers[1].feed_forward.wi. The file's
metadata holds a sha256 of every tensor: safetensors itself checks the header alone.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lingvo_gshard.core import atomic_file

_FORMAT = "lingvo_gshard weights 1"


def write(path: str | pathlib.Path, weights: Mapping[str, np.ndarray], step: int) -> None:
    """Writes the weights after `step` steps; the file is whole or not there."""
    digests = {name: _sha256(array) for name, array in weights.items()}
    metadata = {"format": _FORMAT, "step": str(step), "sha256": json.dumps(digests)}
    arrays = {name: np.asarray(x, order="C") for name, x in weights.items()}
    atomic_file.write(path, save(arrays, metadata))


def read(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads what `write` wrote.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no safetensors file, cut short, another program's, or with a tensor changed.
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            if metadata.get("format") != _FORMAT:
                raise ValueError(
                    f"{path}: another program's file: its format is {metadata.get('format')!r}, "
                    f"not {_FORMAT!r}; it holds {', '.join(sorted(names)[:3]) or 'nothing'}, ..."
                )
            weights = {name: file.get_tensor(name) for name in names}
            digests = json.loads(metadata["sha256"])
    except (SafetensorError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: no safetensors file of weights, or damaged ({error})."
        ) from error
    for name in sorted(digests.keys() | weights.keys()):
        if name not in weights or digests.get(name) != _sha256(weights[name]):
            raise ValueError(f"{path}: damaged: {name} is not what was written.")
    return weights


def table(weights: Mapping[str, np.ndarray]) -> str:
    """A line a tensor, sorted by name: its name, dtype and shape; and the sum of all."""
    width = max(map(len, weights), default=0)
    lines = [f"{name:<{width}}  {x.dtype}{list(x.shape)}" for name, x in sorted(weights.items())]
    total = sum(x.size for x in weights.values())
    return "\n".join([*lines, f"{len(weights)} tensors, {total:,} weights"])


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()
