"""Exported weights: one safetensors file, or several and an index, in Hugging Face's format.

weights.safetensors                   all weights, if they fit in one file
weights-00001-of-00003.safetensors    else one of several part files
weights.safetensors.index.json        maps each entry to its part file; written last

An entry is an array, under its path, or a range of indices along one of its dims, in NumPy's
notation: `theta.encoder.layers[1].feed_forward.wi[0:64]` has that array's first 64 experts. The
metadata of the index, or of the only file, hold all arrays' specs and fingerprints as JSON.
"""

import collections
import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorstore
from tensorstore import TensorStore

from lingvo_gshard.checkpoints import stored
from lingvo_gshard.checkpoints.checked_array import CheckedArray, Index, computed_view, part_shape
from lingvo_gshard.files import safetensors_file, safetensors_parts
from lingvo_gshard.files.safetensors_file import Contents
from lingvo_gshard.files.safetensors_parts import INDEX_SUFFIX, PART_BYTES
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import processes, specs
from xla_spmd.files import atomic_file, digests, json_records, storage

_FORMAT = "lingvo_gshard weights 1"  # In the metadata of every file.
_RANGE_ENTRY = re.compile(r"(.+)\[((?::,)*)(\d+):(\d+)\]")  # NAME[:,:,START:STOP]


@dataclasses.dataclass(frozen=True)
class _Range:
    """The indices start:stop along one axis of an array."""

    axis: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class _PartFile:
    """A file to be written: its entries by name, and the process that writes it."""

    writer: int
    entries: dict[str, CheckedArray]


def write(
    path: pathlib.Path, weights: Mapping[str, CheckedArray], step: int, part_bytes: int = PART_BYTES
) -> pathlib.Path:
    """Writes weights to files of at most `part_bytes`; returns the only file, or the index.

    All processes must call it. Each one writes a range of every array's experts and some of the
    other arrays, and reads one entry at a time. It deletes an earlier export's index first, and
    then its part files. Raises DamagedCheckpointError in all processes if a weight is damaged.
    """
    parts = _parts(weights, part_bytes)
    names = safetensors_parts.file_names(path, len(parts))
    files = dict(zip(names, parts, strict=True))
    has_index = len(parts) > 1

    # Every file names its export; the index, or the only file, describes the arrays.
    arrays = {name: specs.to_json(array.spec) for name, array in weights.items()}
    fingerprints = {name: array.fingerprints for name, array in weights.items()}
    entry_names = [part.entries.keys() for part in parts]
    export = _identity(step, arrays, fingerprints, entry_names)
    identity = {"format": _FORMAT, "step": str(step), "export": export}
    contents = {"arrays": json.dumps(arrays), "fingerprints": json.dumps(fingerprints)}
    metadata = identity if has_index else identity | contents
    index_path = path.with_name(path.name + INDEX_SUFFIX)

    # The earlier export is deleted before any process writes a part file, so that a program never
    # finds files of both exports. In a bucket as well, since it may be read at any time.
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
        entries = {file: part.entries for file, part in files.items()}
        index = safetensors_parts.index(entries, identity | contents)
        atomic_file.write(index_path, index)
    processes.wait_for_all()
    return index_path


def _parts(weights: Mapping[str, CheckedArray], part_bytes: int) -> list[_PartFile]:
    """Returns the files to write, in order; process 0 writes a single one."""
    total_bytes = sum(array.num_bytes for array in weights.values())
    num_writers = jax.process_count() if total_bytes > part_bytes else 1

    entries_by_writer: dict[int, dict[str, CheckedArray]] = collections.defaultdict(dict)
    for number, (name, array) in enumerate(sorted(weights.items())):
        # Each process writes a range of each array's experts. Other arrays go round the processes.
        first_writer = 0 if "E" in array.spec.dims else number
        ranges = _ranges(array, num_writers, part_bytes)
        for i, indices in enumerate(ranges):
            # Neighboring entries share a writer: from 1 of 3, six entries are 1, 1, 2, 2, 0, 0.
            writer = (first_writer + i * num_writers // len(ranges)) % num_writers
            entries_by_writer[writer][_entry_name(name, indices)] = _part_of(array, indices)

    # Each process writes its own files.
    parts = []
    for writer, entries in sorted(entries_by_writer.items()):
        for packed in safetensors_parts.packed(entries, part_bytes):
            parts.append(_PartFile(writer, packed))
    return parts


def _part_of(array: CheckedArray, indices: _Range | None) -> CheckedArray:
    """Returns a range of an array, or the whole array for None."""
    if indices is None:
        return array
    if array.spec.dims[indices.axis] == "E":
        return array.experts(indices.start, indices.stop)
    return array.indexed(tensorstore.d[indices.axis][indices.start : indices.stop])


def _spec_of(spec: TensorSpec, indices: _Range | None) -> TensorSpec:
    """Returns the spec of a range of an array with `spec`, or `spec` itself for None."""
    if indices is None:
        return spec
    shape = list(spec.shape)
    shape[indices.axis] = indices.stop - indices.start
    return dataclasses.replace(spec, shape=tuple(shape))


def _ranges(array: CheckedArray, num_writers: int, part_bytes: int) -> list[_Range | None]:
    """Returns the range of each entry of an array; None stands for the whole array.

    Experts are divided among the writers. Another array is cut along its longest dim, and only if
    it is larger than `part_bytes`. An entry has at least one index, so it may exceed `part_bytes`.
    """
    axis = array.spec.dims.find("E")
    if axis < 0:
        num_writers = 1
        axis = int(np.argmax([*array.shape, 0]))
    if array.num_bytes <= part_bytes and num_writers == 1:
        return [None]

    # Enough ranges that each fits in a file, and that each writer has one.
    size = array.shape[axis]
    indices_per_part = max(1, part_bytes * size // array.num_bytes)
    count = max(min(num_writers, size), math.ceil(size / indices_per_part))
    ends = [i * size // count for i in range(count + 1)]  # For 8 indices in 3: 0, 2, 5, 8.
    return [_Range(axis, start, stop) for start, stop in itertools.pairwise(ends)]


def _remove_earlier(
    index_path: pathlib.Path, path: pathlib.Path, files: Mapping[str, _PartFile]
) -> None:
    """Deletes an earlier export, its index first, except for a file that will be replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The "*" at the end is for a file that a killed export did not finish, *.partial.
    stem = glob.escape(path.stem)
    suffix = glob.escape(path.suffix)
    parts = path.parent.glob(f"{stem}-?????-of-?????{suffix}*")
    for old in (index_path, path, *parts):
        # A file is replaced at once, so it need not be missing for a while.
        is_replaced = len(files) == 1 and old.name in files
        if not is_replaced:
            old.unlink(missing_ok=True)


def _entry_name(path: str, indices: _Range | None) -> str:
    """Returns an entry's name: `wo[:,:,0:4]` for indices 0:4 along axis 2, `wo` for the whole."""
    if indices is None:
        return path
    axes_before = ":," * indices.axis
    return f"{path}[{axes_before}{indices.start}:{indices.stop}]"


def _parsed(entry: str) -> tuple[str, _Range | None]:
    """Parses an entry's name into a path and a range; the inverse of `_entry_name`."""
    match = _RANGE_ENTRY.fullmatch(entry)
    if match is None:
        return entry, None
    name, axes_before, start, stop = match.groups()
    return name, _Range(axes_before.count(":"), int(start), int(stop))


def read(path: str | pathlib.Path) -> dict[str, CheckedArray]:
    """Returns the arrays of an exported file or index by path; each part is read when it is used.

    A part file is opened when an array is first read from it. Arrays are checked by their
    fingerprints, or by the SHA-256 of their entries if they lack fingerprints, as exported means
    do. Raises FileNotFoundError if the index is missing. This call and reading the arrays raise
    ValueError if a file is another program's, damaged, missing, or belongs to another export.
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

        # The recorded digest must match this description.
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
    """Returns a digest of an export: its arrays' specs and fingerprints, each file's entries."""
    return digests.of_json(step, arrays, fingerprints, list(map(sorted, entry_names)))


class _Files:
    """The files of an export, each of which is opened when it is first needed."""

    def __init__(
        self, path: pathlib.Path, export: str | None, file_of_entry: dict[str, str]
    ) -> None:
        """`path` is the index or the only file; `export` is the digest that all files must name."""
        self._path = path
        self._export = export
        self._file_of_entry = file_of_entry
        self._opened: dict[pathlib.Path, Contents] = {}
        self._hashed: set[str] = set()  # The entries that were compared with their SHA-256.
        self._ranges: dict[str, list[_Range | None]] = collections.defaultdict(list)  # By array.
        for entry_name in file_of_entry:
            name, indices = _parsed(entry_name)
            self._ranges[name].append(indices)

    def array(self, name: str, spec: TensorSpec, fingerprints: list[str] | None) -> CheckedArray:
        """Returns the array `name`; its entries' SHA-256 are checked if `fingerprints` is None."""
        open_view = functools.partial(self._view, name, spec, fingerprints is None)
        return CheckedArray(
            name, spec, open_view, fingerprints, self._damage_error, str(self._path)
        )

    def _damage_error(self, reason: str) -> ValueError:
        return ValueError(f"{self._path} is damaged: {reason}.")

    def _view(self, name: str, spec: TensorSpec, is_hashed: bool) -> TensorStore:
        """Returns a view of an array, which opens its files when their entries are read."""
        # Processes may have written the ranges in any order.
        ranges = sorted(self._ranges[name], key=lambda indices: indices.start if indices else 0)
        views = []
        for indices in ranges:
            entry_spec = _spec_of(spec, indices)
            compute = functools.partial(self._read_entry, _entry_name(name, indices), is_hashed)
            views.append(
                computed_view(compute, entry_spec.shape, spec.dtype, part_shape(entry_spec))
            )
        return tensorstore.concat(views, ranges[0].axis) if ranges[0] else views[0]

    def _read_entry(self, entry: str, is_hashed: bool, index: Index, values: np.ndarray) -> None:
        """Reads [index] of an entry into `values`; checks the entry's SHA-256 if `is_hashed`."""
        path = self._path.parent / self._file_of_entry[entry]
        if path not in self._opened:
            self._opened[path] = safetensors_file.read(path)
        contents = self._opened[path]

        # The part files of two exports can have the same names.
        if contents.metadata.get("export") != self._export:
            raise ValueError(f"{path} is a part of another export than {self._path}; export again.")
        if entry not in contents.spans:
            raise ValueError(f"{path} is damaged: it lacks {entry}.")

        # Mapped from the file, and not read yet.
        mapped = contents.arrays[entry]
        if is_hashed and entry not in self._hashed:
            if contents.spans[entry].digest != f"sha256:{safetensors_file.sha256(mapped)}":
                raise ValueError(f"{path} is damaged: {entry} is not what was written.")
            self._hashed.add(entry)
        values[...] = mapped[index]


def _header(path: pathlib.Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the metadata and the file of each entry."""
    if path.name.endswith(INDEX_SUFFIX):
        with _parsing(path):
            index = json_records.parse(path.read_bytes())
            return dict(index["metadata"]), dict(index["weight_map"])
    # A single file describes itself.
    contents = safetensors_file.read(path)
    return contents.metadata, dict.fromkeys(contents.spans, path.name)


@contextlib.contextmanager
def _parsing(path: pathlib.Path) -> Iterator[None]:
    """Raises ValueError, which names the file, if parsing its description fails."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: it does not describe weights ({error!r}).") from error
