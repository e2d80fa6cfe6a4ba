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
import dataclasses
import functools
import glob
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
from lingvo_gshard.files import atomic_file, digests, json_records, safetensors_file, storage
from lingvo_gshard.files.safetensors_file import Contents
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import processes, specs

PART_BYTES = 5 * 10**9
INDEX_SUFFIX = ".index.json"
_FORMAT = "lingvo_gshard weights 1"  # In every file, to tell it from another program's.
_RANGE_ENTRY = re.compile(r"(.+)\[((?::,)*)(\d+):(\d+)\]")  # NAME[:,:,START:STOP]


@dataclasses.dataclass(frozen=True)
class _Range:
    """The indices start:stop along one axis of an array."""

    axis: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _Part:
    """A file to be written: its entries by name, and the process that writes it."""

    writer: int
    entries: dict[str, SavedArray]


def write(
    path: pathlib.Path, weights: Mapping[str, SavedArray], step: int, part_bytes: int = PART_BYTES
) -> pathlib.Path:
    """Writes weights in parts of at most `part_bytes`; returns the only file, or the index.

    All processes must call it. Each reads what it writes, one entry at a time: its range of each
    array's experts, and some of the other arrays. The index or only file of an earlier export is
    deleted before any part of it is. Raises DamagedCheckpointError in all processes.
    """
    parts = _parts(weights, part_bytes)
    files = dict(zip(_file_names(path, len(parts)), parts, strict=True))
    has_index = len(parts) > 1

    # Every file names the export that it belongs to; the index or only file describes the arrays.
    arrays = {name: specs.to_json(array.spec) for name, array in weights.items()}
    fingerprints = {name: array.fingerprints for name, array in weights.items()}
    entry_names = [part.entries.keys() for part in parts]
    export = _identity(step, arrays, fingerprints, entry_names)
    identity = {"format": _FORMAT, "step": str(step), "export": export}
    contents = {"arrays": json.dumps(arrays), "fingerprints": json.dumps(fingerprints)}
    metadata = identity if has_index else identity | contents
    index_path = path.with_name(path.name + INDEX_SUFFIX)

    # The earlier export is gone before any process writes a part, so that a program never finds
    # parts of both. Hence it is published, too: a bucket may be read at any time.
    if processes.is_first():
        _remove_earlier(index_path, path, files)
        storage.publish(path)
    processes.wait_for_all()

    def write_own_parts() -> None:
        for file, part in files.items():
            if part.writer == jax.process_index():
                safetensors_file.write(path.with_name(file), part.entries, metadata)
        storage.publish(path)  # Before process 0 writes the index.

    stored.in_all_processes(path, write_own_parts)
    if not has_index:
        return path

    # With the index, the export is complete.
    if processes.is_first():
        atomic_file.write(index_path, _index(files, identity | contents))
    processes.wait_for_all()
    return index_path


def _file_names(path: pathlib.Path, count: int) -> list[str]:
    """Returns the names of `count` parts; that of a single one is `path`'s."""
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{i:05d}-of-{count:05d}{path.suffix}" for i in range(1, count + 1)]


def _parts(weights: Mapping[str, SavedArray], part_bytes: int) -> list[_Part]:
    """Returns the parts in the order of the files; a single one is written by process 0."""
    total_bytes = sum(array.num_bytes for array in weights.values())
    num_writers = jax.process_count() if total_bytes > part_bytes else 1

    entries_by_writer: dict[int, dict[str, SavedArray]] = collections.defaultdict(dict)
    for number, (name, array) in enumerate(sorted(weights.items())):
        # Each process writes its range of all arrays' experts; others begin at the next process.
        first_writer = 0 if "E" in array.spec.dims else number
        ranges = _ranges(array, num_writers, part_bytes)
        for i, indices in enumerate(ranges):
            writer = _writer(first_writer, i, len(ranges), num_writers)
            entry = array
            if indices is not None:
                entry = array.part(indices.axis, indices.start, indices.stop)
            entries_by_writer[writer][_entry_name(name, indices)] = entry

    # What a process writes is in files of its own.
    parts = []
    for writer, entries in sorted(entries_by_writer.items()):
        for packed in _packed(entries, part_bytes):
            parts.append(_Part(writer, packed))
    return parts


def _writer(first_writer: int, i: int, num_entries: int, num_writers: int) -> int:
    """Returns the process that writes entry `i` of an array; neighbors go to the same one.

    From writer 1 of 3, the six entries of an array are written by 1, 1, 2, 2, 0, 0.
    """
    return (first_writer + i * num_writers // num_entries) % num_writers


def _ranges(array: SavedArray, num_writers: int, part_bytes: int) -> list[_Range | None]:
    """Returns the range of each entry of an array; None stands for the whole array.

    Experts are divided among the writers. Another array is cut, along its longest dim, only if it
    does not fit in a part. A single index is never cut, so such an entry may exceed `part_bytes`.
    """
    axis = array.spec.dims.find("E")
    if axis < 0:
        num_writers = 1
        axis = int(np.argmax([*array.shape, 0]))
    if array.num_bytes <= part_bytes and num_writers == 1:
        return [None]

    # So many ranges that each fits in a part, and that each writer has one.
    size = array.shape[axis]
    indices_per_part = max(1, part_bytes * size // array.num_bytes)
    count = max(min(num_writers, size), math.ceil(size / indices_per_part))
    return [_Range(axis, start, stop) for start, stop in _even_ends(size, count)]


def _even_ends(size: int, count: int) -> list[tuple[int, int]]:
    """Returns the ends of `count` ranges of `size` indices: of 8 in 3, (0, 2), (2, 5), (5, 8)."""
    return [(i * size // count, (i + 1) * size // count) for i in range(count)]


def _packed(entries: Mapping[str, SavedArray], part_bytes: int) -> Iterator[dict[str, SavedArray]]:
    """Yields the entries of each part, in order. An entry above `part_bytes` has its own part."""
    part: dict[str, SavedArray] = {}
    free_bytes = part_bytes
    for name, entry in entries.items():
        # An empty part is filled in any case.
        if part and entry.num_bytes > free_bytes:
            yield part
            part = {}
            free_bytes = part_bytes
        part[name] = entry
        free_bytes -= entry.num_bytes
    yield part


def _remove_earlier(
    index_path: pathlib.Path, path: pathlib.Path, files: Mapping[str, _Part]
) -> None:
    """Deletes an earlier export, its index first. A single file that will be replaced stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The "*" at the end is for a part that a killed export did not finish, *.partial.
    stem = glob.escape(path.stem)
    suffix = glob.escape(path.suffix)
    parts = path.parent.glob(f"{stem}-?????-of-?????{suffix}*")
    for old in (index_path, path, *parts):
        # Writing a file replaces it whole, so a single one need not be missing for a while.
        is_replaced = len(files) == 1 and old.name in files
        if not is_replaced:
            old.unlink(missing_ok=True)


def _index(files: Mapping[str, _Part], metadata: Mapping[str, str]) -> str:
    """Returns the text of the index: the total size, and the file of each entry."""
    total_size = 0
    weight_map: dict[str, str] = {}
    for file, part in files.items():
        total_size += sum(entry.num_bytes for entry in part.entries.values())
        weight_map |= dict.fromkeys(part.entries, file)
    index = {"metadata": {"total_size": total_size, **metadata}, "weight_map": weight_map}
    return json.dumps(index, indent=2) + "\n"


def _entry_name(path: str, indices: _Range | None) -> str:
    """Returns an entry's name: `wo[:,:,0:4]` for indices 0:4 along axis 2, `wo` for the whole."""
    if indices is None:
        return path
    axes_before = ":," * indices.axis
    return f"{path}[{axes_before}{indices.start}:{indices.stop}]"


def _parsed(entry: str) -> tuple[str, _Range | None]:
    """Returns the path and range of an entry's name; the inverse of `_entry_name`."""
    match = _RANGE_ENTRY.fullmatch(entry)
    if match is None:
        return entry, None
    name, axes_before, start, stop = match.groups()
    return name, _Range(axes_before.count(":"), int(start), int(stop))


def read(path: str | pathlib.Path) -> dict[str, SavedArray]:
    """Returns the arrays of an exported file or index by path; parts are read when they are used.

    Only the files that hold what is used are opened. It is checked by its fingerprints, or without
    them, as in an exported mean, by the SHA-256 of its entries. Raises FileNotFoundError for no
    such index, and ValueError, then or when a part is read, for another program's file and for
    files damaged, missing, or of another export.
    """
    path = pathlib.Path(path)
    metadata, file_of_entry = _header(path)
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: another program's file: its format is {metadata.get('format')!r}, not "
            f"{_FORMAT!r}; it holds {', '.join(sorted(file_of_entry)[:3]) or 'nothing'}, ..."
        )
    if "arrays" not in metadata:
        raise ValueError(f"{path} is only a part of an export; give its index, *{INDEX_SUFFIX}.")

    opened = _Files(path, metadata.get("export"), file_of_entry)
    with _parsing(path):
        step = int(metadata["step"])
        arrays = json_records.parse(metadata["arrays"])
        fingerprints = json_records.parse(metadata["fingerprints"])

        # The digest that `write` noted must be that of what is described here.
        parts = collections.defaultdict(list)
        for entry, file in file_of_entry.items():
            parts[file].append(entry)
        entry_names = [parts[file] for file in sorted(parts)]
        if metadata["export"] != _identity(step, arrays, fingerprints, entry_names):
            raise ValueError("it is not what was written")

        return {
            name: opened.array(name, specs.from_json(text), fingerprints[name])
            for name, text in arrays.items()
        }


def _identity(
    step: int, arrays: Any, fingerprints: Any, entry_names: Iterable[Iterable[str]]
) -> str:
    """Returns a digest of an export: its arrays' specs and fingerprints, each part's entries."""
    return digests.of_json(step, arrays, fingerprints, list(map(sorted, entry_names)))


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An entry's name in its file, and the range of its array that it holds; None is all of it."""

    name: str
    indices: _Range | None


class _Files:
    """The files of an export, each of which is opened when it is first read from."""

    def __init__(
        self, path: pathlib.Path, export: str | None, file_of_entry: dict[str, str]
    ) -> None:
        """`path` is the index or the only file; `export` is the digest that all files must name."""
        self._path = path
        self._export = export
        self._file_of_entry = file_of_entry
        self._opened: dict[pathlib.Path, Contents] = {}
        self._entries: dict[str, list[_Entry]] = collections.defaultdict(list)  # By array.
        for entry_name in file_of_entry:
            name, indices = _parsed(entry_name)
            self._entries[name].append(_Entry(entry_name, indices))

    def array(self, name: str, spec: TensorSpec, fingerprints: list[str] | None) -> SavedArray:
        """Returns the array `name`; its entries are hashed when read if it has no fingerprints."""
        # Processes may have written the ranges in any order.
        entries = sorted(self._entries[name], key=_first_index)
        is_hashed = fingerprints is None
        read = functools.partial(self._read, entries, is_hashed)
        return SavedArray(name, spec, fingerprints, read, self._damage_error)

    def _damage_error(self, reason: str) -> ValueError:
        return ValueError(f"{self._path} is damaged: {reason}.")

    def _read(self, entries: list[_Entry], is_hashed: bool, wanted: Index) -> np.ndarray:
        """Returns a copy of [wanted] of an array, a slice for each dim, from its sorted entries."""
        # An array that was not cut.
        if entries[0].indices is None:
            return np.array(self._read_entry(entries[0].name, is_hashed, wanted))

        # What each entry has of the wanted range; most have nothing, and stay closed.
        axis = entries[0].indices.axis
        pieces = []
        for entry in entries:
            held = entry.indices
            assert held is not None
            start = max(held.start, wanted[axis].start)
            stop = min(held.stop, wanted[axis].stop)
            if start < stop:
                within = slice(start - held.start, stop - held.start)
                index = (*wanted[:axis], within, *wanted[axis + 1 :])
                pieces.append(self._read_entry(entry.name, is_hashed, index))
        return np.concatenate(pieces, axis)

    def _read_entry(self, entry: str, is_hashed: bool, index: Index) -> np.ndarray:
        """Returns [index] of an entry, as a view of its file; checks the entry if `is_hashed`."""
        path = self._path.parent / self._file_of_entry[entry]
        if path not in self._opened:
            self._opened[path] = safetensors_file.read(path)
        contents = self._opened[path]

        # Parts of two exports have the same names.
        if contents.metadata.get("export") != self._export:
            raise ValueError(f"{path} is a part of another export than {self._path}; export again.")
        if entry not in contents.arrays:
            raise ValueError(f"{path} is damaged: it lacks {entry}.")

        # Mapped from the file, and not read yet.
        values = contents.arrays[entry]
        if is_hashed:
            sha256_of_entry = json_records.parse(contents.metadata.get("sha256", "{}"))
            if sha256_of_entry.get(entry) != safetensors_file.sha256(values):
                raise ValueError(f"{path} is damaged: {entry} is not what was written.")
        return values[index]


def _first_index(entry: _Entry) -> int:
    return 0 if entry.indices is None else entry.indices.start


def _header(path: pathlib.Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the metadata and the file of each entry."""
    if path.name.endswith(INDEX_SUFFIX):
        with _parsing(path):
            index = json_records.parse(path.read_bytes())
            return dict(index["metadata"]), dict(index["weight_map"])
    # Without an index, the file is its own.
    contents = safetensors_file.read(path)
    return contents.metadata, dict.fromkeys(contents.arrays, path.name)


@contextlib.contextmanager
def _parsing(path: pathlib.Path) -> Iterator[None]:
    """Raises ValueError, which names the file, for the errors of a description that is damaged."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: it does not describe weights ({error!r}).") from error
