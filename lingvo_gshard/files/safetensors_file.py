"""Safetensors files: 8 bytes with the header's length, a JSON header, and each array's bytes.

The safetensors library writes only arrays that are all in memory at once. These functions hold one
array at a time, so that weights larger than a host's memory can be exported.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by name from it)
import numpy as np

from lingvo_gshard.files.tensor_span import TensorSpan
from xla_spmd.files import atomic_file, json_records
from xla_spmd.runtime import progress

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # The safetensors library's own limit.
_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U32": "uint32",
    "U8": "uint8",
}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Contents:
    """The header of a file: the place of each array by name, and the metadata."""

    path: pathlib.Path
    spans: dict[str, TensorSpan]  # With the digests that `write` recorded.
    metadata: dict[str, str]

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays, mapped from the file; changes to them are not written to it."""
        data = np.memmap(self.path, np.uint8, mode="c")  # Pages are read when they are used.
        arrays = {}
        for name, span in self.spans.items():
            values = data[span.offset : span.offset + span.num_bytes]
            arrays[name] = values.view(span.dtype).reshape(span.shape)
        return arrays


def write(
    path: str | pathlib.Path,
    arrays: Mapping[str, Any],
    metadata: Mapping[str, str],
    *,
    in_order: bool = False,
) -> None:
    """Writes a file; if this fails, `path` stays as it was.

    `arrays` have a shape and a dtype. np.asarray converts them one at a time, so arrays on devices
    or on disk need not be in memory together. They are sorted by name, or kept in the given order
    if `in_order`. The file's metadata also have an entry `sha256`: a JSON object with the digest of
    each array.
    """
    # Wider elements come first, as the safetensors library writes them: all are then aligned.
    names = list(arrays) if in_order else sorted(arrays)
    names.sort(key=lambda name: -np.dtype(arrays[name].dtype).itemsize)
    header = _header(arrays, names)

    # The digests are known once the arrays are written. Until then, zeros reserve their space.
    digests = dict.fromkeys(names, "0" * 64)
    num_bytes = max((header[name]["data_offsets"][1] for name in names), default=0)
    with (
        atomic_file.replacing(path) as partial,
        partial.open("wb") as file,
        progress.shown(f"writing {path}", total=num_bytes, unit=progress.BYTES) as done,
    ):
        file.write(_encoded(header, metadata, digests))
        for name in names:
            array = np.asarray(arrays[name])
            file.write(_bytes_of(array))
            digests[name] = sha256(array)
            done.update(array.nbytes)
            del array  # Otherwise it would stay in memory while the next one is read.

        file.seek(0)
        file.write(_encoded(header, metadata, digests))


def _header(arrays: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns the dtype, shape and position of each array, in the order of `names`."""
    header: dict[str, Any] = {}
    begin = 0
    for name in names:
        dtype = np.dtype(arrays[name].dtype)
        shape = arrays[name].shape
        end = begin + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return header


def _encoded(header: dict[str, Any], metadata: Mapping[str, str], digests: dict[str, str]) -> bytes:
    """Returns the bytes before the arrays: the header's length, and the header with metadata."""
    all_metadata = {**metadata, "sha256": json.dumps(digests)}
    text = json.dumps({_METADATA: all_metadata, **header}).encode()
    text += b" " * (-len(text) % 8)  # So that the arrays are aligned.
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read(path: str | pathlib.Path) -> Contents:
    """Reads the header of a file; any part of its arrays can be read later.

    Raises ValueError if the file is missing, is not a safetensors file, is cut short, or has a
    dtype that is not supported, before it takes more memory than the header.
    """
    path = pathlib.Path(path)
    with _readable(path), path.open("rb") as file:
        size = path.stat().st_size
        header_length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header_end = _LENGTH_BYTES + header_length
        if header_length > _MAX_HEADER_BYTES or header_end > size:
            raise ValueError(f"a header of {header_length} bytes")

        header = dict(json_records.parse(file.read(header_length)))
        metadata = header.pop(_METADATA, {})
        sha256_of_entry = json_records.parse(metadata.get("sha256", "{}"))
        spans = {}
        for name, entry in header.items():
            digest = sha256_of_entry.get(name)
            spans[name] = TensorSpan(
                path,
                _checked_offset(entry, header_end, size),
                np.dtype(_DTYPES[entry["dtype"]]),
                tuple(entry["shape"]),
                None if digest is None else f"sha256:{digest}",
            )
        return Contents(path, spans, dict(metadata))


@contextlib.contextmanager
def _readable(path: str | pathlib.Path) -> Iterator[None]:
    """Turns errors of a missing or damaged file into a ValueError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not a safetensors file of weights, or a damaged one ({error!r})."
        ) from error


def _checked_offset(entry: Mapping[str, Any], header_end: int, file_size: int) -> int:
    """Returns where an array begins in its file. Raises ValueError if it ends outside the file."""
    begin, end = entry["data_offsets"]
    if not all(type(number) is int for number in (begin, end, *entry["shape"])):
        raise ValueError(f"an array of {entry['shape']} at {begin} to {end}")
    itemsize = np.dtype(_DTYPES[entry["dtype"]]).itemsize
    num_bytes = itemsize * math.prod(entry["shape"])
    if min(begin, *entry["shape"], 0) < 0 or end - begin != num_bytes:
        raise ValueError(f"an array of {entry['shape']} at {begin} to {end}")
    if header_end + end > file_size:
        raise ValueError(f"it has {file_size} bytes and should have {header_end + end}")
    return int(header_end + begin)


def sha256(array: np.ndarray) -> str:
    """Returns the digest of an array's bytes that `write` records."""
    return hashlib.sha256(_bytes_of(array)).hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
