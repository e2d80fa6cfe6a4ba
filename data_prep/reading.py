"""The first steps over one source: survey its scripts, then clean its pairs into chunks."""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping

from absl import logging

from data_prep import chunks, cleaning, languages
from data_prep.cleaning import Rule
from data_prep.sources import BadRow, Row, Source

_SURVEYED_ROWS = 2000
_LOGGED_LINES = 10


@dataclasses.dataclass(frozen=True)
class CleanJob:
    """A source to be cleaned.

    Attributes:
        source: what is read.
        folder: the folder of the chunks.
        name: the beginning of the chunks' names, unique to the source.
        own_scripts: the scripts of each language.
        limits: the limits of the cleaning rules.
        max_malformed_share: the share of malformed lines that is tolerated.
        held_out_share: the share of a source without a split that goes to each of dev and test.
        pairs_per_chunk: the size of a chunk.
    """

    source: Source
    folder: pathlib.Path
    name: str
    own_scripts: Mapping[str, frozenset[str]]
    limits: cleaning.Limits
    max_malformed_share: float
    held_out_share: float
    pairs_per_chunk: int


@dataclasses.dataclass(frozen=True)
class Cleaned:
    """A source's chunks and, for each language, how many pairs were dropped and repaired."""

    chunks: list[chunks.Chunk]
    dropped: dict[str, collections.Counter[Rule]]
    repaired: collections.Counter[str]


def survey(source: Source) -> dict[str, collections.Counter[str]]:
    """Counts the characters of each script in a source's first rows, by language."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in itertools.islice(source.rows(), _SURVEYED_ROWS):
        if isinstance(row, Row):
            counts[row.language] += languages.count_scripts(row.pair.source)
    return dict(counts)


def held_out_split(english_key: str, held_out_share: float) -> str:
    """Returns the split of a pair, by a hash of its English, for a source without a split.

    Sentences that differ only in case or punctuation are in the same split, in every language.
    """
    position = cleaning.digest(english_key) / 2**64
    if position < held_out_share:
        return "dev"
    return "test" if position < 2 * held_out_share else "train"


def clean(job: CleanJob) -> Cleaned:
    """Cleans a source. Training text is written normalized, dev and test unchanged.

    Raises:
        ValueError: it cannot be read, or too many of its lines are malformed.
    """
    return _Cleaning(job).run()


class _Cleaning:
    def __init__(self, job: CleanJob) -> None:
        self._job = job
        self._writers: dict[tuple[str, str], chunks.Writer] = {}
        self._dropped: dict[str, collections.Counter[Rule]]
        self._dropped = collections.defaultdict(collections.Counter)
        self._repaired: collections.Counter[str] = collections.Counter()

    def run(self) -> Cleaned:
        for row in self._well_formed():
            self._clean_row(row)
        written = [chunk for writer in self._writers.values() for chunk in writer.close()]
        return Cleaned(written, dict(self._dropped), self._repaired)

    def _well_formed(self) -> Iterator[Row]:
        num_rows = num_bad = 0
        for row in self._job.source.rows():
            num_rows += 1
            if isinstance(row, Row):
                yield row
            else:
                num_bad += 1
                self._note_bad(row, num_bad)
        if not num_rows:
            logging.warning("%s is empty", self._job.source)
        limit = self._job.max_malformed_share
        if num_bad > limit * num_rows:
            raise ValueError(
                f"{self._job.source}: {num_bad} of {num_rows} lines are malformed "
                f"({num_bad / num_rows:.1%}), expected at most {limit:.1%}"
            )

    def _note_bad(self, row: BadRow, num_bad: int) -> None:
        self._dropped[row.language][Rule.MALFORMED] += 1
        if num_bad <= _LOGGED_LINES:
            logging.warning("%s:%d: skipped: %s", self._job.source, row.number, row.reason)

    def _clean_row(self, row: Row) -> None:
        job, language = self._job, row.language
        own_scripts = job.own_scripts.get(language, frozenset())
        repaired = cleaning.repair_pair(row.pair, own_scripts)
        normalized = cleaning.normalize_pair(repaired)
        split = job.source.split or held_out_split(
            cleaning.english_key(normalized.english), job.held_out_share
        )
        if split != "train":
            if normalized.source and normalized.english:
                self._writer(split, language).add(row.pair, normalized)
            else:
                self._dropped[language][Rule.EMPTY] += 1
            return
        rule = cleaning.broken_rule(normalized, language, own_scripts, job.limits)
        if rule is not None:
            self._dropped[language][rule] += 1
            return
        self._repaired[language] += repaired != row.pair
        self._writer(split, language).add(normalized, normalized)

    def _writer(self, split: str, language: str) -> chunks.Writer:
        key = (split, language)
        if key not in self._writers:
            job = self._job
            self._writers[key] = chunks.Writer(
                job.folder, split, language, job.name, job.pairs_per_chunk
            )
        return self._writers[key]
