"""Safetensors files: 8 bytes with the header's length, a JSON header, and each array's bytes."""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by name from it)
import numpy as np

from lingvo_gshard.files import atomic_file

_METADATA = "__metadata__"
# fmt: off
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I8": "int8", "U32": "uint32", "U8": "uint8", "BOOL": "bool",
}
# fmt: on
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Contents:
    """A file's arrays by name, mapped from the file, and its metadata."""

    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]


def write(path: str | pathlib.Path, arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes a file; `path` holds all of it or what it held before.

    `arrays` have a shape and a dtype. np.asarray converts them one at a time, so that those on
    devices or on disk need not be in memory together. In the file, the metadata also have an entry
    `sha256`, which maps each name to its array's digest, as JSON.
    """
    header: dict[str, Any] = {}
    end = 0
    # Wider elements come first, as the safetensors library writes them: all are then aligned.
    names = sorted(arrays, key=lambda name: (-np.dtype(arrays[name].dtype).itemsize, name))
    for name in names:
        dtype, shape = np.dtype(arrays[name].dtype), arrays[name].shape
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    digests = dict.fromkeys(names, "0" * 64)  # The digests are known, and written, at the end.
    with atomic_file.replacing(path) as partial, partial.open("wb") as file:
        file.write(_encoded(header, metadata, digests))
        for name in names:
            array = np.asarray(arrays[name])
            file.write(_bytes_of(array))
            digests[name] = sha256(array)
            del array  # Otherwise it would be in memory while the next one is read.
        file.seek(0)
        file.write(_encoded(header, metadata, digests))


def read(path: str | pathlib.Path) -> Contents:
    """Maps a file into memory; changes to the arrays are not written to it.

    Raises ValueError if the file is missing, is not a safetensors file, is cut short, or has a
    dtype that is not supported.
    """
    try:
        data = np.memmap(path, np.uint8, mode="c")
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = dict(json.loads(data[8:begin].tobytes()))
        metadata = header.pop(_METADATA, {})
        arrays = {
            name: data[begin:][slice(*field["data_offsets"])]
            .view(np.dtype(_DTYPES[field["dtype"]]))
            .reshape(field["shape"])
            for name, field in header.items()
        }
        return Contents(arrays, metadata)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not a safetensors file of weights, or a damaged one ({error!r})."
        ) from error


def sha256(array: np.ndarray) -> str:
    """The digest of an array's bytes, as `write` records it."""
    return hashlib.sha256(_bytes_of(array)).hexdigest()


def _encoded(header: dict[str, Any], metadata: Mapping[str, str], digests: dict[str, str]) -> bytes:
    text = json.dumps({_METADATA: {**metadata, "sha256": json.dumps(digests)}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
