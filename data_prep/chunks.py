"""The first steps over one source: survey its scripts, then clean its pairs into chunks.

Tasks clean a source span by span. A chunk holds pairs of one span, few enough to be in memory:

    <name>.tsv          source<TAB>english, in the order of the source
    <name>.digests.npy  uint64 [n, 3]: of the pair, of the English's key, of the source's key
    <name>.kept.npy     bool [n]: the pairs that selection.py keeps; only for training text
"""

import array
import collections
import dataclasses
import itertools
import pathlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

import numpy as np
from absl import logging

from data_prep import cleaning, languages, tsv
from data_prep.cleaning import Rule
from data_prep.config import BuildConfig
from data_prep.sources import Source
from data_prep.tsv import Pair
from lingvo_gshard.files import atomic_file

PAIR, ENGLISH, SOURCE = range(3)  # The digests' columns.
_SURVEYED_ROWS = 2000
_LOGGED_LINES = 10
Dropped = collections.Counter[tuple[str, Rule]]  # Numbers of pairs by language and rule.


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of a language's split: its pairs from position `start` on; `path` has their text."""

    split: str
    language: str
    path: pathlib.Path
    num_pairs: int
    start: int = 0

    def array_path(self, name: str) -> pathlib.Path:
        """Returns the path of an array, such as the digests, beside the text."""
        return self.path.with_suffix(f".{name}.npy")

    def digests(self) -> np.ndarray:
        """Maps the digests from their file, uint64 [n, 3]."""
        return np.load(self.array_path("digests"), mmap_mode="r")

    def pairs(self) -> Iterator[Pair]:
        """Yields all pairs, in order."""
        with self.path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield Pair(*line.rstrip("\n").split("\t"))

    def is_kept(self) -> np.ndarray:
        """Returns which pairs were selected, bool [n]: in dev and test, all of them."""
        if self.split != "train":
            return np.ones(self.num_pairs, bool)
        return np.load(self.array_path("kept"))

    def kept_pairs(self, positions: range = tsv.WHOLE) -> Iterator[Pair]:
        """Yields the pairs that were selected and are at `positions`."""
        chosen = self.is_kept()
        chosen[: max(positions.start - self.start, 0)] = False
        chosen[max(positions.stop - self.start, 0) :] = False
        both = zip(self.pairs(), chosen.tolist(), strict=True)
        yield from (pair for pair, is_chosen in both if is_chosen)


def save_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes an array as np.save does, whole or not at all."""
    with atomic_file.replacing(path, is_shared=True) as partial, partial.open("wb") as file:
        np.save(file, array)


class Writer:
    """Writes the chunks of one span to a new folder in `folder`."""

    def __init__(self, folder: pathlib.Path, pairs_per_chunk: int) -> None:
        # The same task may be running elsewhere, given up as lost.
        self._folder = folder / uuid.uuid4().hex
        self._pairs_per_chunk = pairs_per_chunk
        self._open: dict[tuple[str, str], tuple[IO[str], array.array[int]]] = {}
        self._chunks: list[Chunk] = []

    def add(self, split: str, language: str, pair: Pair, normalized: Pair) -> None:
        """Writes `pair` and the digests of `normalized`."""
        key = (split, language)
        if key not in self._open:
            path = self._folder / f"{split}-{language}-{len(self._chunks):05d}.tsv"
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open[key] = path.open("w", encoding="utf-8", newline="\n"), array.array("Q")
        file, digests = self._open[key]
        keys = (cleaning.english_key(normalized.english), normalized.source.casefold())
        digests.extend(map(cleaning.digest, (normalized.line, *keys)))
        file.write(pair.line)
        if len(digests) == 3 * self._pairs_per_chunk:
            self._close(key)

    def close(self) -> list[Chunk]:
        """Ends the last chunks and returns all chunks, those of a language in order."""
        for key in list(self._open):
            self._close(key)
        return self._chunks

    def _close(self, key: tuple[str, str]) -> None:
        file, digests = self._open.pop(key)
        file.close()
        chunk = Chunk(*key, pathlib.Path(file.name), len(digests) // 3)
        np.save(chunk.array_path("digests"), np.array(digests, np.uint64).reshape(-1, 3))
        self._chunks.append(chunk)


@dataclasses.dataclass(frozen=True)
class Cleaned:
    """What a source or span became: chunks, and counts by language."""

    chunks: list[Chunk]
    dropped: Dropped
    repaired: collections.Counter[str]
    malformed: list[tuple[int, str]]  # The first ones' numbers, from 1, and what is wrong.

    @property
    def num_rows(self) -> int:
        return self.dropped.total() + sum(chunk.num_pairs for chunk in self.chunks)


def survey(source: Source) -> dict[str, collections.Counter[str]]:
    """Counts the characters of each script in a source's first rows, by language."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in itertools.islice(source.rows(), _SURVEYED_ROWS):
        if isinstance(row.pair, Pair):
            counts[row.language] += languages.count_scripts(row.pair.source)
    return dict(counts)


def scripts(
    surveys: Iterable[Mapping[str, collections.Counter[str]]],
    configured: Mapping[str, Iterable[str]],
) -> dict[str, frozenset[str]]:
    """Returns the scripts of each language, from the surveys of all sources: see `own_scripts`."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for surveyed in surveys:
        for code, found in surveyed.items():
            counts[code] += found
    return {code: languages.own_scripts(code, found, configured) for code, found in counts.items()}


def clean(
    source: Source,
    span: range,
    folder: pathlib.Path,
    scripts: Mapping[str, frozenset[str]],
    config: BuildConfig,
) -> Cleaned:
    """Cleans a span of a source into chunks in `folder`, given the scripts of each language.

    Training text is written normalized, dev and test unchanged. ValueError if it cannot be read.
    """
    made = Cleaned([], collections.Counter(), collections.Counter(), [])
    writer, by_language = Writer(folder, config.pairs_per_chunk), dict(scripts)
    for number, row in enumerate(source.rows(span), start=1):
        language, pair = row.language, row.pair
        if not isinstance(pair, Pair):
            made.dropped[language, Rule.LOW_SCORE if pair is None else Rule.MALFORMED] += 1
            if pair and len(made.malformed) < _LOGGED_LINES:
                made.malformed.append((number, pair))
            continue
        if language not in by_language:  # It comes after the rows that were surveyed.
            by_language[language] = languages.own_scripts(language, {}, config.scripts)
        own_scripts = by_language[language]
        english = cleaning.repair(pair.english, cleaning.ENGLISH_SCRIPTS)
        fixed = Pair(cleaning.repair(pair.source, own_scripts), english)
        normalized = cleaning.normalize_pair(fixed)
        split = source.split or _held_out_split(normalized.english, config.held_out_share)
        if split == "train":
            rule = cleaning.broken_rule(normalized, language, own_scripts, config)
            made.repaired[language] += rule is None and fixed != pair
            pair = normalized
        else:
            rule = None if normalized.source and normalized.english else Rule.EMPTY
        if rule is None:
            writer.add(split, language, pair, normalized)
        else:
            made.dropped[language, rule] += 1
    made.chunks.extend(writer.close())
    return made


def _held_out_split(english: str, held_out_share: float) -> str:
    """Returns the split of a pair by a hash of its `english_key`, the same in every language."""
    position = cleaning.digest(cleaning.english_key(english)) / 2**64
    if position < held_out_share:
        return "dev"
    return "test" if position < 2 * held_out_share else "train"


def join(source: Source, parts: Sequence[Cleaned], max_malformed_share: float) -> Cleaned:
    """Joins a source's spans; warns of malformed lines, and raises ValueError for too many."""
    made = Cleaned([], collections.Counter(), collections.Counter(), [])
    for part in parts:
        for number, reason in part.malformed[: _LOGGED_LINES - len(made.malformed)]:
            made.malformed.append((made.num_rows + number, reason))
        made.chunks.extend(part.chunks)
        made.dropped.update(part.dropped)
        made.repaired.update(part.repaired)
    for number, reason in made.malformed:
        logging.warning("%s:%d: skipped: %s", source, number, reason)
    num_bad = sum(number for (_, rule), number in made.dropped.items() if rule is Rule.MALFORMED)
    num_rows = made.num_rows
    if not num_rows:
        logging.warning("%s is empty", source)
    if num_bad > max_malformed_share * num_rows:
        raise ValueError(
            f"{source}: {num_bad} of {num_rows} lines are malformed "
            f"({num_bad / num_rows:.1%}), expected at most {max_malformed_share:.1%}"
        )
    return made
