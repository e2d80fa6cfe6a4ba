"""Safetensors files: 8 bytes with the header's length, a JSON header, and each array's bytes."""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by name from it)
import numpy as np

from lingvo_gshard.core import atomic_file

_METADATA = "__metadata__"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}


class ArrayLike(Protocol):
    """An array of numpy or JAX, or one that np.asarray reads from disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def write(
    path: str | pathlib.Path,
    arrays: Mapping[str, ArrayLike],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file; `path` holds all of it or what it held before.

    Converts one array at a time with np.asarray, so no more than one need be in memory. The
    metadata gets an entry `sha256`, which maps each name to its array's digest, as JSON.
    """
    header: dict[str, Any] = {_METADATA: {}}
    end = 0
    # Wider elements come first, as the safetensors library writes them: all are then aligned.
    names = sorted(arrays, key=lambda name: (-np.dtype(arrays[name].dtype).itemsize, name))
    for name in names:
        dtype, shape = np.dtype(arrays[name].dtype), arrays[name].shape
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    digests = dict.fromkeys(names, "0" * 64)  # Of the right length; known only at the end.
    with atomic_file.replacing(path) as partial, partial.open("wb") as file:
        file.write(_encoded(header, metadata, digests))
        for name in names:
            data = _bytes_of(np.asarray(arrays[name], order="C"))
            digests[name] = hashlib.sha256(data).hexdigest()
            file.write(data)
        file.seek(0)
        file.write(_encoded(header, metadata, digests))


def read(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays by name, mapped from the file; changes to them stay in memory.

    Raises:
      ValueError: the file is missing, is no safetensors file, is cut short, or has a dtype that is
        not supported.
    """
    header, begin = _header(path)
    try:
        data = np.memmap(path, np.uint8, mode="c")[begin:]
        arrays = {
            name: data[slice(*field["data_offsets"])]
            .view(np.dtype(_DTYPES[field["dtype"]]))
            .reshape(field["shape"])
            for name, field in header.items()
            if name != _METADATA
        }
        if sum(array.nbytes for array in arrays.values()) != data.size:
            raise ValueError("its length is not what its header says")
        return arrays
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def read_metadata(path: str | pathlib.Path) -> dict[str, str]:
    """Returns the metadata, empty if there is none; ValueError as `read`."""
    return _header(path)[0].get(_METADATA, {})


def sha256(array: np.ndarray) -> str:
    """Returns the digest of an array's bytes, as `write` records it."""
    return hashlib.sha256(_bytes_of(np.asarray(array, order="C"))).hexdigest()


def _encoded(
    header: dict[str, Any], metadata: Mapping[str, str] | None, digests: dict[str, str]
) -> bytes:
    header[_METADATA] = {**(metadata or {}), "sha256": json.dumps(digests)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header(path: str | pathlib.Path) -> tuple[dict[str, Any], int]:
    """The header, and where the arrays begin."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, pathlib.Path(path).stat().st_size)))
            if not isinstance(header, dict):
                raise ValueError("its header is no JSON object")
            return header, 8 + length
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _unreadable(path: str | pathlib.Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a safetensors file of weights, or a damaged one ({error!r}).")
