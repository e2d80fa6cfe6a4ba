"""Chunks: the files with cleaned pairs or documents between the steps of a build.

A chunk has examples from one span of a source, few enough that their digests fit into memory:

    <name>.tsv          source<TAB>target or a document per line, in the order of the source
    <name>.digests.npy  uint64 [n, 3]: of the pair, of the target's key, of the source's key
    <name>.kept.npy     bool [n]: the pairs that deduplication.py keeps; only for training text

The target is English, except for pairs without English. The text of a document counts as its source
and its English.
"""

import array
import contextlib
import dataclasses
import pathlib
import uuid
from collections.abc import Iterator
from typing import IO, BinaryIO, Self

import numpy as np

from data_prep import cleaning, keys, tsv
from data_prep.tsv import Example
from xla_spmd.files import atomic_file

# The columns of a chunk's digests.
PAIR = 0
TARGET = 1
SOURCE = 2
_NUM_COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of a language's split: its examples from position `start`; `path` has their text.

    The language is a pair's name, see languages.py, or a document's corpus.
    """

    split: str
    language: str
    path: pathlib.Path
    num_examples: int
    start: int = 0

    def array_path(self, name: str) -> pathlib.Path:
        """Returns the path of an array, such as the digests, beside the text."""
        return self.path.with_suffix(f".{name}.npy")

    def digests(self) -> np.ndarray:
        """Maps the digests from their file, uint64 [n, 3]."""
        return np.load(self.array_path("digests"), mmap_mode="r")

    def examples(self) -> Iterator[Example]:
        """Yields all examples, in order."""
        with self.path.open(encoding="utf-8", newline="\n") as file:
            yield from map(tsv.of_line, file)

    def is_kept(self) -> np.ndarray:
        """Returns which examples were selected, bool [n]; in dev and test, all of them."""
        if self.split != "train":
            return np.ones(self.num_examples, bool)
        return np.load(self.array_path("kept"))

    def kept_examples(self, positions: range = tsv.WHOLE) -> Iterator[Example]:
        """Yields the selected examples at `positions`."""
        is_wanted = self.is_kept()

        # Positions count over all chunks of the split, indices within this one.
        first_index = max(positions.start - self.start, 0)
        end_index = max(positions.stop - self.start, 0)
        is_wanted[:first_index] = False
        is_wanted[end_index:] = False

        # Without an index of its lines, the whole chunk is read.
        for example, wanted in zip(self.examples(), is_wanted.tolist(), strict=True):
            if wanted:
                yield example


def save_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes an array like np.save, but whole or not at all."""
    with atomic_file.replacing(path, is_shared=True) as partial, partial.open("wb") as file:
        _write_array(file, array)


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    """Writes an array like np.save, whose error for a full disk would not name the reason."""
    array = np.ascontiguousarray(array)  # The header names the order in memory.
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.data)


@dataclasses.dataclass(frozen=True)
class _OpenChunk:
    """A chunk that is being written, and the digests of its examples so far, row after row."""

    file: IO[str]
    digests: "array.array[int]" = dataclasses.field(default_factory=lambda: array.array("Q"))

    @property
    def num_examples(self) -> int:
        return len(self.digests) // _NUM_COLUMNS


class ChunkWriter:
    """Writes the chunks of one span to a new folder in `folder`.

    As a context manager, it closes the files of unfinished chunks if an error ends it.
    """

    def __init__(self, folder: pathlib.Path, pairs_per_chunk: int) -> None:
        # Each run of a task has its own folder, since a run that seems lost may still be writing.
        self._folder = folder / uuid.uuid4().hex
        self._pairs_per_chunk = pairs_per_chunk
        self._open: dict[tuple[str, str], _OpenChunk] = {}  # By split and language.
        self._closed: list[Chunk] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for chunk in self._open.values():
            # The current error may already be a full disk's.
            with contextlib.suppress(OSError):
                chunk.file.close()

    def add(self, split: str, language: str, example: Example, normalized: Example) -> None:
        """Writes `example` and the digests of `normalized`."""
        key = (split, language)
        if key not in self._open:
            self._open[key] = self._new_chunk(split, language)
        chunk = self._open[key]

        # One row of digests, in the order of the columns.
        chunk.digests.append(cleaning.digest(normalized.line))
        chunk.digests.append(cleaning.digest(keys.of(normalized, language)))
        chunk.digests.append(cleaning.digest(keys.of_source(normalized)))
        chunk.file.write(example.line)

        if chunk.num_examples == self._pairs_per_chunk:
            self._close(key)

    def close(self) -> list[Chunk]:
        """Ends the last chunks and returns all chunks; a language's chunks are in order."""
        for key in list(self._open):
            self._close(key)
        return self._closed

    def _new_chunk(self, split: str, language: str) -> _OpenChunk:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{split}-{language}-{len(self._closed):05d}.tsv"
        return _OpenChunk(path.open("w", encoding="utf-8", newline="\n"))

    def _close(self, key: tuple[str, str]) -> None:
        split, language = key
        written = self._open.pop(key)
        written.file.close()

        chunk = Chunk(split, language, pathlib.Path(written.file.name), written.num_examples)
        digests = np.array(written.digests, np.uint64).reshape(-1, _NUM_COLUMNS)
        with chunk.array_path("digests").open("wb") as file:
            _write_array(file, digests)
        self._closed.append(chunk)
