"""Chunks: the cleaned text between the steps, so many pairs a file, with digests beside them.

    <name>.tsv          source<TAB>english, in the order of the source
    <name>.digests.npy  uint64 [n, 3]: of the pair, of the English's key, of the source's key
    <name>.kept.npy     bool [n]: what selection.py leaves; of training text alone

A chunk is as much as a step holds in memory, however long the file that it comes from.
"""

import array
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import IO

import numpy as np

from data_prep import cleaning, tsv

PAIR, ENGLISH, SOURCE = range(3)  # The columns of the digests.


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of a language's split; `path` is that of its text."""

    split: str
    language: str
    path: pathlib.Path
    num_pairs: int

    @property
    def kept_path(self) -> pathlib.Path:
        """Where the selection is."""
        return self.path.with_suffix(".kept.npy")

    def digests(self) -> np.ndarray:
        """uint64 [n, 3], mapped from the file."""
        return np.load(_digests_path(self.path), mmap_mode="r")

    def pairs(self) -> Iterator[tsv.Pair]:
        """All pairs, in order."""
        with self.path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                source, english = line.rstrip("\n").split("\t")
                yield tsv.Pair(source, english)

    def kept_pairs(self) -> Iterator[tsv.Pair]:
        """The pairs that were selected; all, of dev and test."""
        if self.split != "train":
            yield from self.pairs()
            return
        for pair, is_kept in zip(self.pairs(), np.load(self.kept_path).tolist(), strict=True):
            if is_kept:
                yield pair


class Writer:
    """Writes one language's split of one source, chunk after chunk. Close it to get them."""

    def __init__(
        self, folder: pathlib.Path, split: str, language: str, name: str, pairs_per_chunk: int
    ) -> None:
        self._folder, self._split, self._language = folder / split / language, split, language
        self._name, self._pairs_per_chunk = name, pairs_per_chunk
        self._folder.mkdir(parents=True, exist_ok=True)
        self._chunks: list[Chunk] = []
        self._file: IO[str] | None = None
        self._digests = array.array("Q")

    def add(self, pair: tsv.Pair, normalized: tsv.Pair) -> None:
        """Writes `pair`; digests are those of the normalized one."""
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8", newline="\n")
        line = tsv.line_of(normalized)
        self._digests.append(cleaning.digest(line))
        self._digests.append(cleaning.digest(cleaning.english_key(normalized.english)))
        self._digests.append(cleaning.digest(cleaning.source_key(normalized.source)))
        self._file.write(tsv.line_of(pair))
        if len(self._digests) == 3 * self._pairs_per_chunk:
            self._end_chunk()

    def close(self) -> list[Chunk]:
        """Ends the last chunk and returns all."""
        self._end_chunk()
        return self._chunks

    @property
    def _path(self) -> pathlib.Path:
        return self._folder / f"{self._name}-{len(self._chunks):05d}.tsv"

    def _end_chunk(self) -> None:
        if self._file is None:
            return
        self._file.close()
        digests = np.array(self._digests, np.uint64).reshape(-1, 3)
        np.save(_digests_path(self._path), digests)
        self._chunks.append(Chunk(self._split, self._language, self._path, len(digests)))
        self._file, self._digests = None, array.array("Q")


def _digests_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".digests.npy")
