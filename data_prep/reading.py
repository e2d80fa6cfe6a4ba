"""The first steps over one source: survey its scripts, then clean its pairs into chunks."""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping

from absl import logging

from data_prep import chunks, cleaning, languages
from data_prep.cleaning import Rule
from data_prep.config import BuildConfig
from data_prep.sources import Source
from data_prep.tsv import Pair

_SURVEYED_ROWS = 2000
_LOGGED_LINES = 10


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
        if isinstance(row.pair, Pair):
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


def clean(
    source: Source,
    chunks_dir: pathlib.Path,
    name: str,
    own_scripts: Mapping[str, frozenset[str]],
    config: BuildConfig,
) -> Cleaned:
    """Cleans a source. Training text is written normalized, dev and test unchanged.

    The chunks' names begin with `name`, which is unique to the source.

    Raises:
        ValueError: the source cannot be read, or too many of its lines are malformed.
    """
    dropped: dict[str, collections.Counter[Rule]] = collections.defaultdict(collections.Counter)
    repaired: collections.Counter[str] = collections.Counter()
    writers: dict[tuple[str, str], chunks.Writer] = {}
    for language, pair in _well_formed(source, config.max_malformed_share, dropped):
        scripts = own_scripts.get(language, frozenset())
        fixed = cleaning.repair_pair(pair, scripts)
        normalized = cleaning.normalize_pair(fixed)
        split = source.split or held_out_split(
            cleaning.english_key(normalized.english), config.held_out_share
        )
        if split == "train":
            rule = cleaning.broken_rule(normalized, language, scripts, config)
        else:
            rule = None if normalized.source and normalized.english else Rule.EMPTY
        if rule is not None:
            dropped[language][rule] += 1
            continue
        if (split, language) not in writers:
            writers[split, language] = chunks.Writer(
                chunks_dir, split, language, name, config.pairs_per_chunk
            )
        if split == "train":
            repaired[language] += fixed != pair
        writers[split, language].add(normalized if split == "train" else pair, normalized)
    written = [chunk for writer in writers.values() for chunk in writer.close()]
    return Cleaned(written, dict(dropped), repaired)


def _well_formed(
    source: Source, max_malformed_share: float, dropped: dict[str, collections.Counter[Rule]]
) -> Iterator[tuple[str, Pair]]:
    """Yields the language and the pair of each well-formed row and counts the others."""
    num_rows = num_bad = 0
    for row in source.rows():
        num_rows += 1
        if isinstance(row.pair, Pair):
            yield row.language, row.pair
            continue
        num_bad += 1
        dropped[row.language][Rule.MALFORMED] += 1
        if num_bad <= _LOGGED_LINES:
            logging.warning("%s:%d: skipped: %s", source, row.pair.number, row.pair.reason)
    if not num_rows:
        logging.warning("%s is empty", source)
    if num_bad > max_malformed_share * num_rows:
        raise ValueError(
            f"{source}: {num_bad} of {num_rows} lines are malformed "
            f"({num_bad / num_rows:.1%}), expected at most {max_malformed_share:.1%}"
        )
