"""Exports weights: every process writes some of the parts that exported.py describes."""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core import atomic_file, safetensors_file, storage
from lingvo_gshard.spmd import processes, specs
from lingvo_gshard.train import exported, stored
from lingvo_gshard.train.stored import Index, SavedArray

PART_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A part of a saved array, which np.asarray reads; `shape` is that of array[index]."""

    array: SavedArray
    index: Index
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array[self.index]


_Part = dict[str, _Entry]


def write(
    path: pathlib.Path, weights: Mapping[str, SavedArray], step: int, part_bytes: int = PART_BYTES
) -> pathlib.Path:
    """Writes weights in parts of at most `part_bytes`; returns the only file, or the index.

    All processes must call it. Each reads what it writes, one entry at a time: its range of each
    array's experts, and some of the other arrays. The index or only file of an earlier export is
    deleted before any part of it is. Raises DamagedCheckpointError in all processes.
    """
    parts = _parts(weights, part_bytes)
    arrays = {name: specs.to_json(array.spec) for name, array in weights.items()}
    fingerprints = {name: array.fingerprints for name, array in weights.items()}
    export = exported.identity(step, arrays, fingerprints, (part for _, part in parts))
    identity = {"format": exported.FORMAT, "step": str(step), "export": export}
    contents = {"arrays": json.dumps(arrays), "fingerprints": json.dumps(fingerprints)}
    files = dict(zip(_file_names(path, len(parts)), parts, strict=True))
    metadata = identity | contents if len(files) == 1 else identity
    index = path.with_name(path.name + exported.INDEX_SUFFIX)

    def write_own() -> None:
        for file, (process, part) in files.items():
            if process == jax.process_index():
                safetensors_file.write(path.with_name(file), part, metadata)
        storage.publish(path)  # Before process 0 writes the index.

    if processes.is_first():
        _remove(index, path, files)
    processes.of_first(0)  # The others wait until it is gone.
    stored.in_all_processes(path, write_own)
    if len(files) == 1:
        return path
    if processes.is_first():
        atomic_file.write(index, _index(files, identity | contents))
    processes.of_first(0)
    return index


def _parts(weights: Mapping[str, SavedArray], part_bytes: int) -> list[tuple[int, _Part]]:
    """Returns the parts and the processes that write them, which every process computes alike.

    What fits in one part is written by process 0.
    """
    total = sum(_Entry(array, (), array.shape).num_bytes for array in weights.values())
    num_writers = jax.process_count() if total > part_bytes else 1
    own: dict[int, _Part] = collections.defaultdict(dict)
    for number, (name, array) in enumerate(sorted(weights.items())):
        entries = _cut(array, num_writers, part_bytes)
        first = 0 if "E" in array.spec.dims else number
        for i, entry in enumerate(entries):
            writer = (first + i * num_writers // len(entries)) % num_writers
            own[writer][exported.entry_name(name, entry.index)] = entry
    return [(writer, part) for writer in sorted(own) for part in _packed(own[writer], part_bytes)]


def _cut(array: SavedArray, num_writers: int, part_bytes: int) -> list[_Entry]:
    """Returns an array's entries, ranges that fit in a part of each writer's experts.

    Without experts, it is cut only if it does not fit, along its longest dim; an index never.
    """
    whole, shape, axis = _Entry(array, (), array.shape), array.shape, array.spec.dims.find("E")
    if axis < 0:
        axis, num_writers = int(np.argmax([*shape, 0])), 1
    if whole.num_bytes <= part_bytes and num_writers == 1:
        return [whole]
    size = shape[axis]
    per_part = max(1, part_bytes * size // whole.num_bytes)
    count = max(min(num_writers, size), math.ceil(size / per_part))
    ends = [i * size // count for i in range(count + 1)]
    before, after = (slice(None),) * axis, shape[axis + 1 :]
    return [
        _Entry(array, (*before, slice(begin, end)), (*shape[:axis], end - begin, *after))
        for begin, end in itertools.pairwise(ends)
    ]


def _packed(entries: _Part, part_bytes: int) -> Iterator[_Part]:
    """Yields the entries in parts, in order."""
    part: _Part = {}
    free = part_bytes
    for name, entry in entries.items():
        free -= entry.num_bytes
        if part and free < 0:
            yield part
            part, free = {}, part_bytes - entry.num_bytes
        part[name] = entry
    yield part


def _file_names(path: pathlib.Path, count: int) -> list[str]:
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{i:05d}-of-{count:05d}{path.suffix}" for i in range(1, count + 1)]


def _remove(index: pathlib.Path, path: pathlib.Path, files: Mapping[str, Any]) -> None:
    """Deletes an earlier export, its index first. A single file that will be replaced stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = path.parent.glob(f"{path.stem}-?????-of-?????{path.suffix}*")
    for old in (index, path, *parts):
        if old.name not in files or len(files) > 1:
            old.unlink(missing_ok=True)


def _index(files: Mapping[str, tuple[int, _Part]], metadata: Mapping[str, str]) -> str:
    total = sum(entry.num_bytes for _, part in files.values() for entry in part.values())
    weight_map = {name: file for file, (_, part) in files.items() for name in part}
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    return json.dumps(index, indent=2) + "\n"
