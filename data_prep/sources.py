"""Formats of parallel text, as streams of rows; see also multilingual.py and parquet.py.

Formats of text in one language are in documents.py.
"""

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import polib

from data_prep import languages, tsv
from data_prep.rules import Rule
from data_prep.tsv import Example, Malformed, Pair
from lingvo_gshard.files import json_records, text_file
from lingvo_gshard.input.manifest import Kind

# What is read of a large plain file for a sample of its rows.
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


# As a catalog's header has it.
_MAX_CATALOG_BYTES = 1 << 28  # A catalog is read as a whole.
_CHARSET = re.compile(rb'"Content-Type: *text/plain; *charset=([\w-]+)')
# A line with a string that begins and does not end.
_UNTERMINATED = re.compile(r'^[ \t]*(?:msg[\w\[\]]*[ \t]*)?"(?:.*[^"\s])?\s*$', re.MULTILINE)
_MAX_PRINTED_CHARS = 40
_OTHER_LINE_ENDS = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
MISSING = object()  # In place of the value of a field that is not there.


@dataclasses.dataclass(frozen=True)
class Row:
    """What one line, or another unit of a source, holds; or the rule by which it holds nothing.

    `language` is the name of its pair of languages, such as de if the other one is English (see
    languages.py), or that of a document's corpus. A source
    yields a row for each pair or document that it has, so that none is lost without being counted.
    """

    language: str
    example: Example | Malformed | Rule


class Source:
    """One file, or whatever else is named together; sources are read in parallel.

    `split` is train, dev, test, or another that is only decoded; None: the text of each example
    decides, of a pair its English.
    """

    kind: ClassVar[Kind] = Kind.PARALLEL  # What its rows are.
    split: str | None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The files and folders that the source reads, as far as they are known in advance."""
        return tuple(value for value in vars(self).values() if isinstance(value, pathlib.Path))

    def __str__(self) -> str:
        return " and ".join(map(str, self.files))

    @property
    def is_without_english(self) -> bool:
        """Whether it has pairs of which no side is English."""
        return False

    @property
    def _row_language(self) -> str:
        """The language or corpus of all rows, if there is one."""
        raise NotImplementedError

    def spans(self) -> list[range]:
        """Returns the parts that tasks may read separately, in order; most formats have one."""
        return [tsv.WHOLE]

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        """Yields a span's rows in order. Raises ValueError if the text has another format."""
        raise NotImplementedError

    def sampled_rows(self) -> Iterator[Row]:
        """Yields rows from all over the source, in order: all of them, if it can't be entered."""
        return self.rows()


@dataclasses.dataclass(frozen=True)
class File(Source):
    """A file of text in one language, or of pairs: see languages.py for their names."""

    path: pathlib.Path
    language: str

    @property
    def is_without_english(self) -> bool:
        return languages.is_without_english(self.language)

    @property
    def _row_language(self) -> str:
        return self.language


class LineFile(Source):
    """A file with one example a line, plain or gzip; a plain one is split by ranges of bytes."""

    path: pathlib.Path

    def spans(self) -> list[range]:
        # A compressed file can only be read from its start.
        if self.path.suffix == ".gz":
            return [tsv.WHOLE]

        size = self.path.stat().st_size
        num_spans = max(1, math.ceil(size / tsv.BYTES_PER_SPAN))
        bounds = [i * size // num_spans for i in range(num_spans + 1)]
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def sampled_rows(self) -> Iterator[Row]:
        # A compressed file can only be read from its start, and one that is gone tells so.
        size = 0
        if self.path.suffix != ".gz" and self.path.is_file():
            size = self.path.stat().st_size
        if size <= _SAMPLES * _SAMPLE_BYTES:
            yield from self.rows()
            return

        # Lines that begin in short ranges at even distances.
        for i in range(_SAMPLES):
            start = i * size // _SAMPLES
            yield from self.rows(range(start, start + _SAMPLE_BYTES))

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        examples = tsv.read_lines(self.path, self._parse_unless_blank, span)
        return (Row(self._row_language, example) for example in examples)

    def _parse_unless_blank(self, line: str) -> Example | Rule:
        # An empty line, such as the last one of many files, is no damage.
        return self._parse(line) if line.strip() else Rule.EMPTY

    def _parse(self, line: str) -> Example | Rule:
        """Returns a line's example, or the rule by which it has none.

        Raises ValueError if the line is malformed.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TsvFile(LineFile, File):
    """`source<TAB>english` lines."""

    split: str | None = None

    def _parse(self, line: str) -> Pair:
        return tsv.parse(line)


@dataclasses.dataclass(frozen=True)
class ColumnsFile(LineFile, File):
    """Columns between tabs, numbered from 0. Lines with a score below `min_score` are dropped."""

    source_column: int
    english_column: int
    score_column: int | None = None
    min_score: float = 0.0
    split: str | None = None

    def _parse(self, line: str) -> Pair | Rule:
        columns = line.split("\t")
        try:
            if self.score_column is not None:
                score = float(columns[self.score_column])
                if not score >= self.min_score:  # NaN is no score.
                    return Rule.LOW_SCORE
            return Pair.of(columns[self.source_column], columns[self.english_column])
        except IndexError as error:
            raise ValueError(f"there are only {len(columns)} columns") from error


@dataclasses.dataclass(frozen=True)
class MosesFiles(Source):
    """Two files, plain or gzip, whose lines with the same number are translations."""

    source: pathlib.Path
    english: pathlib.Path
    language: str
    split: str | None = None

    @property
    def is_without_english(self) -> bool:
        return languages.is_without_english(self.language)

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        sources = tsv.read_lines(self.source, str)
        englishes = tsv.read_lines(self.english, str)
        lines = itertools.zip_longest(sources, englishes)
        for number, (source, english) in enumerate(lines, start=1):
            # One file has ended before the other. An empty last line is no damage.
            if source is None or english is None:
                rest = english if source is None else source
                if rest == "" and not isinstance(rest, Malformed):
                    yield Row(self.language, Rule.EMPTY)
                    continue
                shorter = self.source if source is None else self.english
                differ = f"{self} differ in their number of lines"
                raise ValueError(f"{differ}: {shorter.name} ends after {number - 1}")

            # Malformed is itself a str, so it must be looked for first.
            if isinstance(source, Malformed):
                yield Row(self.language, source)
            elif isinstance(english, Malformed):
                yield Row(self.language, english)
            else:
                yield Row(self.language, Pair.of(source, english))


@dataclasses.dataclass(frozen=True)
class JsonlFile(LineFile, File):
    """One JSON object a line; dots in a field's name lead into inner objects."""

    source_field: str
    english_field: str
    split: str | None = None

    def _parse(self, line: str) -> Pair:
        fields = parse_json(line)
        return Pair.of(text_at(fields, self.source_field), text_at(fields, self.english_field))


@dataclasses.dataclass(frozen=True)
class PoFile(File):
    """A gettext catalog's messages, of which the fuzzy and the obsolete ones are dropped.

    For a message with plurals, the first form is the singular and the last one the plural.
    """

    split: str | None = None

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        with text_file.opened_text(self.path) as file:
            content = file.read(_MAX_CATALOG_BYTES + 1)
        if len(content) > _MAX_CATALOG_BYTES:
            raise ValueError(f"{self.path} has over {_MAX_CATALOG_BYTES >> 20} MiB, not a catalog")

        # Bytes that are no text cost their message: it has a replacement character.
        charset = _CHARSET.search(content)
        encoding = "utf-8" if charset is None else charset[1].decode("ascii")
        if encoding == "CHARSET":  # As a template has it.
            encoding = "utf-8"
        try:
            text = content.decode(encoding, "replace").removeprefix("\ufeff")
            # polib would take them for ends of lines.
            messages = _messages(_OTHER_LINE_ENDS.sub(" ", text))
        except (OSError, LookupError, UnicodeError) as error:
            raise ValueError(f"{self.path} is not a gettext catalog: {error}") from error

        for message in messages:
            if isinstance(message, Malformed):
                yield Row(self.language, message)
                continue

            # A message with plurals has numbered forms in place of one text.
            forms = [message.msgstr]
            if message.msgstr_plural:
                forms = [form for _, form in sorted(message.msgstr_plural.items())]
            pairs = [Pair.of(forms[0], message.msgid)]
            if message.msgid_plural:
                pairs.append(Pair.of(forms[-1], message.msgid_plural))

            rule = _rule_of(message)
            for pair in pairs:
                yield Row(self.language, rule or pair)


def _messages(text: str) -> list[polib.POEntry | Malformed]:
    """Returns a catalog's messages; one that is not written as messages are is Malformed.

    Raises OSError if no part of the text is a message.
    """
    try:
        return list(_parsed_catalog(text))
    except OSError as error:
        problem = error

    # Blank lines stand between messages, so the others can be read without the damaged one.
    messages: list[polib.POEntry | Malformed] = []
    num_read = 0
    for block in re.split(r"\n\s*\n", text):
        try:
            catalog = _parsed_catalog(block)
        except OSError as error:
            messages.append(Malformed(f"not a message of a catalog: {error}"))
            continue
        messages += catalog
        num_read += len(catalog) + len(catalog.metadata)
    if num_read == 0:
        raise problem
    return messages


def _parsed_catalog(text: str) -> polib.POFile:
    # polib would take the last character for the quote that is missing.
    unterminated = _UNTERMINATED.search(text)
    if unterminated:
        raise OSError(f"no quote ends {unterminated[0].strip()[:_MAX_PRINTED_CHARS]}")
    # Text with a newline is no path.
    return polib.pofile(text + "\n", encoding="utf-8")


def _rule_of(message: polib.POEntry) -> Rule | None:
    """Returns the rule by which a message of a catalog is dropped; None if it is translated."""
    if message.obsolete:
        return Rule.OBSOLETE
    if message.fuzzy:
        return Rule.FUZZY
    return None if message.translated() else Rule.UNTRANSLATED


def parse_json(line: str) -> Any:
    """Returns a line's JSON. Raises ValueError if it is none."""
    try:
        return json_records.parse(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def value_at(fields: Any, dotted: str) -> Any:
    """Returns the value of a field, MISSING if there is none.

    Dots lead into inner objects, unless a field has them in its own name.
    """
    if not isinstance(fields, dict):
        return MISSING
    if dotted in fields:
        return fields[dotted]

    names = dotted.split(".")
    for i in range(len(names) - 1, 0, -1):
        outer = ".".join(names[:i])
        if outer in fields:
            return value_at(fields[outer], ".".join(names[i:]))
    return MISSING


def text_at(fields: Any, dotted: str) -> str:
    """Returns the text of a field; null has none.

    Raises ValueError if the field is missing, or is not valid Unicode.
    """
    text = value_at(fields, dotted)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"no text in field {dotted!r}")
    text.encode()  # Raises ValueError: JSON can spell half of a character.
    return text
