"""The first two steps over one source: survey its scripts, then clean its rows into chunks.

A source is cleaned in tasks, span by span, and the results of its spans are joined afterwards.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from absl import logging

from data_prep import cleaning, languages, mojibake, tsv
from data_prep.config import BuildConfig
from data_prep.rules import Counts, Rule
from data_prep.sources import Row, Source
from data_prep.text_chunks import Chunk, ChunkWriter
from data_prep.tsv import Document, Example
from lingvo_gshard.input.normalization import Normalization

_SURVEYED_ROWS = 2000  # At least for each language of a source; at most twice as many.
_LOGGED_LINES = 10
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")


@dataclasses.dataclass(frozen=True)
class Cleaned(Counts):
    """The results of cleaning a source or span: chunks, and counts by language."""

    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    # The first malformed lines: their numbers, from 1, and their problems.
    malformed: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """The number of rows, dropped and kept."""
        return self.dropped.total() + sum(chunk.num_examples for chunk in self.chunks)

    @property
    def num_malformed(self) -> int:
        """The number of rows that are not examples."""
        malformed = (n for (_, rule), n in self.dropped.items() if rule is Rule.MALFORMED)
        return sum(malformed)


def survey(source: Source) -> dict[str, collections.Counter[str]]:
    """Counts the characters of each script in rows from all over a source, by language.

    A file may begin with text that is unlike the rest of it. Raises ValueError if the source lacks
    a requested part.
    """
    source.check()
    samples: dict[str, _Sample] = collections.defaultdict(_Sample)
    for row in source.sampled_rows():
        if isinstance(row.example, Example):
            of_sides = languages.sides(row.language)
            for language, text in zip(of_sides, row.example.sides, strict=False):
                # The English of pairs is known to be in Latin letters.
                if language != languages.ENGLISH or isinstance(row.example, Document):
                    samples[language].add(text)

    counts: dict[str, collections.Counter[str]] = {}
    for language, sample in samples.items():
        counts[language] = collections.Counter()
        for text in sample.texts:
            counts[language] += languages.count_scripts(text)
    return counts


@dataclasses.dataclass
class _Sample:
    """Evenly spaced texts from a stream whose length is known only at its end."""

    texts: list[str] = dataclasses.field(default_factory=list)
    distance: int = 1
    num_seen: int = 0

    def add(self, text: str) -> None:
        """Takes or skips the next text of the stream."""
        if self.num_seen % self.distance == 0:
            self.texts.append(text)
        self.num_seen += 1

        if len(self.texts) == 2 * _SURVEYED_ROWS:
            self.texts = self.texts[::2]
            self.distance *= 2


def scripts_by_language(
    surveys: Iterable[Mapping[str, collections.Counter[str]]],
    configured: Mapping[str, Iterable[str]],
) -> dict[str, frozenset[str]]:
    """Returns the scripts of each language from the surveys of all sources: see `own_scripts`."""
    totals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for counts_by_language in surveys:
        for language, counts in counts_by_language.items():
            totals[language] += counts

    return {
        language: languages.own_scripts(language, counts, configured)
        for language, counts in totals.items()
    }


def clean(
    source: Source,
    span: range,
    folder: pathlib.Path,
    scripts: Mapping[str, frozenset[str]],
    config: BuildConfig,
    normalization: Normalization = Normalization.NFC,
) -> Cleaned:
    """Cleans a span of a source into chunks in `folder`, given the scripts of each language.

    Training text is written normalized for its vocabulary, dev and test unchanged. Raises
    ValueError if the source cannot be read.
    """
    cleaned = Cleaned()
    known_scripts = {languages.ENGLISH: cleaning.ENGLISH_SCRIPTS, **scripts}

    with ChunkWriter(folder, config.pairs_per_chunk) as writer:
        for language, example in _well_formed(source.rows(span), cleaned):
            own_scripts = [
                _scripts_of(of_side, known_scripts, config) for of_side in languages.sides(language)
            ]
            readable = cleaning.unescape_sides(example) if config.unescape else example

            # Rules, and the keys that compare training text with dev and test, use this form.
            repaired = cleaning.repair_sides(readable, own_scripts)
            normalized = cleaning.normalize_sides(repaired)
            split = source.split or _split_of(normalized.sides[-1], config.held_out_share)

            # Dev and test, which are for measuring, stay unchanged; they lose only empty examples.
            if split == "train":
                written = cleaning.normalize_sides(repaired, normalization)
                rule = cleaning.broken_rule(normalized, language, own_scripts, config)
                # Checked before normalization, which would remove the telling control characters.
                if any(map(mojibake.is_likely, repaired.sides)):
                    cleaned.mojibake[language] += 1
            else:
                written = readable
                rule = None if all(normalized.sides) else Rule.EMPTY

            if rule is not None:
                cleaned.dropped[language, rule] += 1
                continue
            writer.add(split, language, written, normalized)
            if split == "train" and repaired != example:
                cleaned.repaired[language] += 1
            if split == "train" and cleaning.is_escaped(written):
                cleaned.escaped[language] += 1

        cleaned.chunks.extend(writer.close())
    return cleaned


def _scripts_of(
    language: str, known: dict[str, frozenset[str]], config: BuildConfig
) -> frozenset[str]:
    """Returns the scripts of a language; adds a language that the survey did not meet."""
    if language not in known:
        known[language] = languages.own_scripts(language, {}, config.scripts)
    return known[language]


def _well_formed(rows: Iterable[Row], cleaned: Cleaned) -> Iterator[tuple[str, Example]]:
    """Yields the language and example of each well-formed row; counts the others in `cleaned`."""
    for number, row in enumerate(map(_in_order, rows), start=1):
        cleaned.read[row.language] += 1
        if isinstance(row.example, Example):
            yield row.language, row.example
        elif isinstance(row.example, Rule):
            cleaned.dropped[row.language, row.example] += 1
        else:
            cleaned.dropped[row.language, Rule.MALFORMED] += 1
            if len(cleaned.malformed) < _LOGGED_LINES:
                cleaned.malformed.append((number, row.example))


def _in_order(row: Row) -> Row:
    """Returns a row with the sides of its pair in the order of the pair's name."""
    language = languages.in_order(row.language)
    if language == row.language:
        return row
    example = row.example
    if isinstance(example, Example):
        example = tsv.with_sides(example, example.sides[::-1])
    return Row(language, example)


def _split_of(text: str, held_out_share: float) -> str:
    """Returns the split of a pair's last side, or a document, by a hash of its letters and digits.

    An English sentence has the same split in every language and corpus. Texts with the same key
    (keys.py) have the same split, since their letters and digits are the same.
    """
    letters = _NOT_ALPHANUMERIC.sub("", text.casefold())
    position = cleaning.digest(letters or text) / 2**64  # From 0 to 1.
    if position < held_out_share:
        return "dev"
    if position < 2 * held_out_share:
        return "test"
    return "train"


def join(source: Source, spans: Sequence[Cleaned], max_malformed_share: float) -> Cleaned:
    """Joins a source's spans; warns about malformed lines. Raises ValueError for too many."""
    joined = Cleaned()
    for span in spans:
        # A span numbers its own lines, so the lines of earlier spans are added.
        for number, reason in span.malformed[: _LOGGED_LINES - len(joined.malformed)]:
            joined.malformed.append((joined.num_rows + number, reason))
        joined.chunks.extend(span.chunks)
        joined.add(span)

    for number, reason in joined.malformed:
        logging.warning("%s:%d: skipped: %s", source, number, reason)
    for (language, rule), number in joined.dropped.items():
        if rule is Rule.UNKNOWN_LANGUAGE:
            logging.warning(
                "%s: %d texts of %r are dropped: this is not a language; expected a BCP-47 code "
                "like de or zh-Hant",
                source,
                number,
                language,
            )
    if joined.num_rows == 0:
        logging.warning("%s is empty", source)
    if joined.num_malformed > max_malformed_share * joined.num_rows:
        raise ValueError(
            f"{source}: {joined.num_malformed} of {joined.num_rows} lines are malformed "
            f"({joined.num_malformed / joined.num_rows:.1%}), "
            f"expected at most {max_malformed_share:.1%}; max_malformed_share allows more"
        )
    return joined
