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
import json
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lingvo_gshard.core import digests, safetensors_file
from lingvo_gshard.core.safetensors_file import Contents
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import specs
from lingvo_gshard.train.stored import Index, SavedArray

FORMAT = "lingvo_gshard weights 1"
INDEX_SUFFIX = ".index.json"
_RANGE = re.compile(r"(.+)\[((?::,)*)(\d+):(\d+)\]")
_Entries = list[tuple[Index, str]]


def entry_name(path: str, index: Index) -> str:
    """Returns the name of the entry that holds [index] of an array; `index` ends in its range."""
    if not index:
        return path
    return f"{path}[{':,' * (len(index) - 1)}{index[-1].start}:{index[-1].stop}]"


def read(path: str | pathlib.Path) -> dict[str, SavedArray]:
    """Returns the arrays of an exported file or index by path, parts of which are read when used.

    Only the files that hold a part are opened. It is checked as SavedArray says, and an entry of a
    mean, which has no fingerprints, by its SHA-256. Raises FileNotFoundError if there is no such
    file, and ValueError, then or when a part is read, for another program's file and for files that
    are damaged, missing, or of another export.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    metadata, files = _header(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path}: another program's file: its format is {metadata.get('format')!r}, not "
            f"{FORMAT!r}; it holds {', '.join(sorted(files)[:3]) or 'nothing'}, ..."
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
        if written != identity(step, arrays, fingerprints, parts.values()):
            raise ValueError("it is not what was written")
        return {
            name: opened.array(name, specs.from_json(text), fingerprints[name])
            for name, text in arrays.items()
        }


def identity(step: int, arrays: Any, fingerprints: Any, parts: Iterable[Iterable[str]]) -> str:
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
            first = index[axis].start
            begin, end = max(first, wanted[axis].start), min(index[axis].stop, wanted[axis].stop)
            if begin < end:
                here = slice(begin - first, end - first)
                own = (*wanted[:axis], here, *wanted[axis + 1 :])
                parts.append(self._part(entry, hashed, own))
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
    """The inverse of `entry_name`."""
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
