"""Chunks: the cleaned text between the steps, a fixed number of pairs a file.

    <name>.tsv          source<TAB>english, in the order of the source
    <name>.digests.npy  uint64 [n, 3]: of the pair, of the English's key, of the source's key
    <name>.kept.npy     bool [n]: the pairs that selection.py keeps; only for training text

However long a source is, a step holds only one chunk of it in memory.
"""

import array
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import IO

import numpy as np

from data_prep import cleaning, tsv

PAIR, ENGLISH, SOURCE = range(3)  # The digests' columns.


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of one split of a language; `path` is the path of its text."""

    split: str
    language: str
    path: pathlib.Path
    num_pairs: int

    @property
    def kept_path(self) -> pathlib.Path:
        """The path of the selection."""
        return self.path.with_suffix(".kept.npy")

    def digests(self) -> np.ndarray:
        """Maps the digests from their file, uint64 [n, 3]."""
        return np.load(_digests_path(self.path), mmap_mode="r")

    def pairs(self) -> Iterator[tsv.Pair]:
        """Yields all pairs, in order."""
        with self.path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                source, english = line.rstrip("\n").split("\t")
                yield tsv.Pair(source, english)

    def kept_pairs(self) -> Iterator[tsv.Pair]:
        """Yields the pairs that were selected: in dev and test, all of them."""
        if self.split != "train":
            yield from self.pairs()
            return
        for pair, is_kept in zip(self.pairs(), np.load(self.kept_path).tolist(), strict=True):
            if is_kept:
                yield pair


class Writer:
    """Writes one split of one language of one source; `close` returns its chunks."""

    def __init__(
        self, folder: pathlib.Path, split: str, language: str, name: str, pairs_per_chunk: int
    ) -> None:
        self._stem, self._split, self._language = folder / split / language / name, split, language
        self._pairs_per_chunk = pairs_per_chunk
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        self._chunks: list[Chunk] = []
        self._file: IO[str] | None = None
        self._digests = array.array("Q")

    def add(self, pair: tsv.Pair, normalized: tsv.Pair) -> None:
        """Writes `pair` and the digests of `normalized`."""
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8", newline="\n")
        english, source = normalized.english, normalized.source
        texts = (normalized.line, cleaning.english_key(english), cleaning.source_key(source))
        self._digests.extend(map(cleaning.digest, texts))
        self._file.write(pair.line)
        if len(self._digests) == 3 * self._pairs_per_chunk:
            self.close()

    def close(self) -> list[Chunk]:
        """Ends the last chunk and returns all chunks."""
        if self._file is not None:
            self._file.close()
            digests = np.array(self._digests, np.uint64).reshape(-1, 3)
            np.save(_digests_path(self._path), digests)
            self._chunks.append(Chunk(self._split, self._language, self._path, len(digests)))
            self._file, self._digests = None, array.array("Q")
        return self._chunks

    @property
    def _path(self) -> pathlib.Path:
        return self._stem.with_name(f"{self._stem.name}-{len(self._chunks):05d}.tsv")


def _digests_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".digests.npy")
