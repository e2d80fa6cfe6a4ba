"""Exported weights: a safetensors file, or parts of bounded size with an index as Hugging Face's.

weights.safetensors                   everything, if it fits in one part
weights-00001-of-00003.safetensors    else the parts
weights.safetensors.index.json        and which of them holds which entry; written last

An entry is an array, under its path, or a range of indices along one of its dims, as NumPy writes
it: `theta.encoder.layers[1].feed_forward.wi[0:64]` is [0:64] of that array, its first 64 experts.
The metadata of the index, or of the only file, hold all arrays' specs and fingerprints as JSON.
"""

import collections
import contextlib
import functools
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from lingvo_gshard.checkpoints import stored
from lingvo_gshard.checkpoints.stored import Index, SavedArray
from lingvo_gshard.files import atomic_file, digests, safetensors_file, storage
from lingvo_gshard.files.safetensors_file import Contents
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import processes, specs

PART_BYTES = 5 * 10**9
INDEX_SUFFIX = ".index.json"
_FORMAT = "lingvo_gshard weights 1"
_RANGE = re.compile(r"(.+)\[((?::,)*)(\d+):(\d+)\]")
_Entries = list[tuple[Index, str]]
_Part = dict[str, SavedArray]  # By the names of entries.


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
    export = _identity(step, arrays, fingerprints, (part for _, part in parts))
    identity = {"format": _FORMAT, "step": str(step), "export": export}
    contents = {"arrays": json.dumps(arrays), "fingerprints": json.dumps(fingerprints)}
    count, names = len(parts), [path.name]
    if count > 1:
        names = [f"{path.stem}-{i:05d}-of-{count:05d}{path.suffix}" for i in range(1, count + 1)]
    files = dict(zip(names, parts, strict=True))
    metadata = identity | contents if len(files) == 1 else identity
    index = path.with_name(path.name + INDEX_SUFFIX)

    def write_own() -> None:
        for file, (process, part) in files.items():
            if process == jax.process_index():
                safetensors_file.write(path.with_name(file), part, metadata)
        storage.publish(path)  # Before process 0 writes the index.

    if processes.is_first():
        _remove(index, path, files)
        storage.publish(path)  # In a bucket, too, before another process writes a part.
    processes.wait_for_all()
    stored.in_all_processes(path, write_own)
    if len(files) == 1:
        return path
    if processes.is_first():
        atomic_file.write(index, _index(files, identity | contents))
    processes.wait_for_all()
    return index


def _parts(weights: Mapping[str, SavedArray], part_bytes: int) -> list[tuple[int, _Part]]:
    """Returns the parts and the process that writes each; a single part is process 0's."""
    total = sum(array.num_bytes for array in weights.values())
    num_writers = jax.process_count() if total > part_bytes else 1
    own: dict[int, _Part] = collections.defaultdict(dict)
    for number, (name, array) in enumerate(sorted(weights.items())):
        entries = _cut(array, num_writers, part_bytes)
        first = 0 if "E" in array.spec.dims else number
        for i, (index, entry) in enumerate(entries):
            writer = (first + i * num_writers // len(entries)) % num_writers
            own[writer][_entry_name(name, index)] = entry
    return [(writer, part) for writer in sorted(own) for part in _packed(own[writer], part_bytes)]


def _cut(array: SavedArray, num_writers: int, part_bytes: int) -> list[tuple[Index, SavedArray]]:
    """Returns an array's entries: ranges of experts, or of the longest dim if it does not fit."""
    shape, axis = array.shape, array.spec.dims.find("E")
    if axis < 0:
        axis, num_writers = int(np.argmax([*shape, 0])), 1
    if array.num_bytes <= part_bytes and num_writers == 1:
        return [((), array)]
    size = shape[axis]
    per_part = max(1, part_bytes * size // array.num_bytes)
    count = max(min(num_writers, size), math.ceil(size / per_part))
    ends = [i * size // count for i in range(count + 1)]
    ranges = [(*[slice(None)] * axis, slice(*pair)) for pair in itertools.pairwise(ends)]
    return [(index, array.part(index)) for index in ranges]


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


def _entry_name(path: str, index: Index) -> str:
    """Returns the name of the entry that holds [index] of an array; `index` ends in its range."""
    if not index:
        return path
    return f"{path}[{':,' * (len(index) - 1)}{index[-1].start}:{index[-1].stop}]"


def read(path: str | pathlib.Path) -> dict[str, SavedArray]:
    """Returns the arrays of an exported file or index by path, parts of which are read when used.

    Only the files that hold a part are opened; it is checked as by SavedArray, an entry of a mean
    by its SHA-256. Raises FileNotFoundError for no such index, and ValueError, then or when a part
    is read, for another program's file and for files damaged, missing, or of another export.
    """
    path = pathlib.Path(path)
    metadata, files = _header(path)
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: another program's file: its format is {metadata.get('format')!r}, not "
            f"{_FORMAT!r}; it holds {', '.join(sorted(files)[:3]) or 'nothing'}, ..."
        )
    if "arrays" not in metadata:
        raise ValueError(f"{path} is only a part of an export; give its index, *{INDEX_SUFFIX}.")
    opened = _Files(path, metadata.get("export"), files)
    with _parsing(path):
        arrays, fingerprints = (json.loads(metadata[key]) for key in ("arrays", "fingerprints"))
        parts = collections.defaultdict(list)
        for entry, file in sorted(files.items(), key=lambda item: item[1]):
            parts[file].append(entry)
        step, written = int(metadata["step"]), metadata["export"]
        if written != _identity(step, arrays, fingerprints, parts.values()):
            raise ValueError("it is not what was written")
        return {
            name: opened.array(name, specs.from_json(text), fingerprints[name])
            for name, text in arrays.items()
        }


def _identity(step: int, arrays: Any, fingerprints: Any, parts: Iterable[Iterable[str]]) -> str:
    """Returns a digest of an export: specs and fingerprints of its arrays, each part's entries."""
    return digests.of_json(step, arrays, fingerprints, list(map(sorted, parts)))


class _Files:
    """The files of an export, each of which is opened when it is first read from."""

    def __init__(self, path: pathlib.Path, export: str | None, files: dict[str, str]) -> None:
        """`path` is the index or the only file, and `files` has the file of each entry."""
        self._path, self._export, self._files = path, export, files
        self._opened: dict[pathlib.Path, Contents] = {}
        self._entries: dict[str, _Entries] = collections.defaultdict(list)
        for entry in files:
            name, index = _parsed(entry)
            self._entries[name].append((index, entry))

    def array(self, name: str, spec: TensorSpec, fingerprints: list[str] | None) -> SavedArray:
        # Processes may have written the ranges in any order.
        entries = sorted(self._entries[name], key=lambda held: [s.start for s in held[0][-1:]])
        return SavedArray(
            name,
            spec,
            fingerprints,
            functools.partial(self._read, entries, fingerprints is None),
            lambda reason: ValueError(f"{self._path} is damaged: {reason}."),
        )

    def _read(self, entries: _Entries, hashed: bool, wanted: Index) -> np.ndarray:
        """Returns a copy of [wanted] of an array, which holds a slice of each dim."""
        if not entries[0][0]:
            return np.array(self._part(entries[0][1], hashed, wanted))
        axis, parts = len(entries[0][0]) - 1, []
        for index, entry in entries:
            held, asked = index[axis], wanted[axis]
            begin, end = max(held.start, asked.start), min(held.stop, asked.stop)
            if begin < end:
                here = slice(begin - held.start, end - held.start)
                parts.append(self._part(entry, hashed, (*wanted[:axis], here, *wanted[axis + 1 :])))
        return np.concatenate(parts, axis)

    def _part(self, entry: str, hashed: bool, index: Index) -> np.ndarray:
        path = self._path.parent / self._files[entry]
        if path not in self._opened:
            self._opened[path] = safetensors_file.read(path)
        found = self._opened[path]
        if found.metadata.get("export") != self._export:
            raise ValueError(f"{path} is a part of another export than {self._path}; export again.")
        if entry not in found.arrays:
            raise ValueError(f"{path} is damaged: it lacks {entry}.")
        listed = json.loads(found.metadata.get("sha256", "{}"))
        if hashed and listed.get(entry) != safetensors_file.sha256(found.arrays[entry]):
            raise ValueError(f"{path} is damaged: {entry} is not what was written.")
        return found.arrays[entry][index]


def _parsed(entry: str) -> tuple[str, Index]:
    """The inverse of `_entry_name`."""
    if not (match := _RANGE.fullmatch(entry)):
        return entry, ()
    name, dims_before, begin, end = match.groups()
    return name, (*[slice(None)] * (len(dims_before) // 2), slice(int(begin), int(end)))


def _header(path: pathlib.Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the metadata and the file of each entry."""
    if path.name.endswith(INDEX_SUFFIX):
        with _parsing(path):
            index = json.loads(path.read_bytes())
            return dict(index["metadata"]), dict(index["weight_map"])
    found = safetensors_file.read(path)
    return found.metadata, dict.fromkeys(found.arrays, path.name)


@contextlib.contextmanager
def _parsing(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: it does not describe weights ({error!r}).") from error
