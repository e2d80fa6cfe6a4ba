"""Weights in several safetensors files, and an index that maps each array to its file.

    NAME.safetensors                   all arrays, if they fit in one file
    NAME-00001-of-00003.safetensors    else one of several part files
    NAME.safetensors.index.json        maps each array to its part file

This is Hugging Face's format.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

INDEX_SUFFIX = ".index.json"
PART_BYTES = 5 * 10**9  # The size of Hugging Face's files.


class _Sized(Protocol):
    """An array that may not be in memory."""

    @property
    def num_bytes(self) -> int:
        """The array's size."""


_Array = TypeVar("_Array", bound=_Sized)


def packed(arrays: Mapping[str, _Array], part_bytes: int) -> Iterator[dict[str, _Array]]:
    """Yields the arrays of each file, in order. An array above `part_bytes` has its own file."""
    part: dict[str, _Array] = {}
    free_bytes = part_bytes
    for name, array in arrays.items():
        # An array that is too large goes into an empty file.
        if part and array.num_bytes > free_bytes:
            yield part
            part = {}
            free_bytes = part_bytes
        part[name] = array
        free_bytes -= array.num_bytes
    yield part


def file_names(path: pathlib.Path, count: int) -> list[str]:
    """Returns the names of `count` part files; a single file has the name of `path`."""
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{i:05d}-of-{count:05d}{path.suffix}" for i in range(1, count + 1)]


def index(files: Mapping[str, Mapping[str, _Array]], metadata: Mapping[str, str]) -> str:
    """Returns the text of the index: the total size, and each array's file."""
    total_size = 0
    weight_map: dict[str, str] = {}
    for file, arrays in files.items():
        total_size += sum(array.num_bytes for array in arrays.values())
        weight_map |= dict.fromkeys(arrays, file)
    fields = {"metadata": {"total_size": total_size, **metadata}, "weight_map": weight_map}
    return json.dumps(fields, indent=2) + "\n"
