"""Formats of parallel text, as streams of rows; see also multilingual.py and parquet.py.

Formats of text in one language are in documents.py.
"""

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import polib

from data_prep import languages, tsv
from data_prep.rules import Rule
from data_prep.tsv import Example, Malformed, Pair
from lingvo_gshard.files import text_file
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import json_records

# The parts of a large plain file that are read to sample its rows.
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


# The charset in a catalog's header.
_MAX_CATALOG_BYTES = 1 << 28  # A catalog is read as a whole.
_CHARSET = re.compile(rb'"Content-Type: *text/plain; *charset=([\w-]+)')
# A line with a string that lacks its closing quote.
_UNTERMINATED = re.compile(r'^[ \t]*(?:msg[\w\[\]]*[ \t]*)?"(?:.*[^"\s])?\s*$', re.MULTILINE)
_MAX_PRINTED_CHARS = 40
_OTHER_LINE_ENDS = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_MAX_NAMES = 20  # The most fields of a line that a message names.
# Stand-ins for the value of a field that is missing, or inside something that is not an object.
MISSING = object()
NO_OBJECT = object()


@dataclasses.dataclass(frozen=True)
class Row:
    """The content of a line, or of another unit of a source; or the rule that drops it.

    `language` is the name of its pair of languages, such as de if the other one is English (see
    languages.py), or of a document's corpus. A source yields a row for each pair or document that
    it has, so that each one is counted.
    """

    language: str
    example: Example | Malformed | Rule


class Source:
    """One file, or several that belong together; sources are read in parallel.

    `split` is train, dev, test, or another split that is only decoded. If it is None, the text of
    each example decides; for a pair, its English.
    """

    kind: ClassVar[Kind] = Kind.PARALLEL  # The kind of its rows.
    split: str | None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The files and folders that the source reads, if they are known in advance."""
        return tuple(value for value in vars(self).values() if isinstance(value, pathlib.Path))

    def __str__(self) -> str:
        return " and ".join(map(str, self.files))

    @property
    def is_without_english(self) -> bool:
        """Whether it has pairs in which neither side is English."""
        return False

    @property
    def _row_language(self) -> str:
        """The language or corpus that all rows share, if any."""
        raise NotImplementedError

    def spans(self) -> list[range]:
        """Returns the parts that tasks can read separately, in order; most formats have one."""
        return [tsv.WHOLE]

    def check(self) -> None:
        """Raises ValueError if the text lacks something that the source reads."""

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        """Yields a span's rows in order. Raises ValueError if the text has another format."""
        raise NotImplementedError

    def sampled_rows(self) -> Iterator[Row]:
        """Yields rows from all over the source, in order; all rows if it can only be read whole."""
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
    """A file with one example per line, plain or gzip; a plain file is split by ranges of bytes."""

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
        # A compressed file can only be read from its start; a missing file is reported by `rows`.
        size = 0
        if self.path.suffix != ".gz" and self.path.is_file():
            size = self.path.stat().st_size
        if size <= _SAMPLES * _SAMPLE_BYTES:
            yield from self.rows()
            return

        # Lines that begin in short, evenly spaced ranges.
        for i in range(_SAMPLES):
            start = i * size // _SAMPLES
            yield from self.rows(range(start, start + _SAMPLE_BYTES))

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        examples = tsv.read_lines(self.path, self._parse_unless_blank, span)
        return (Row(self._row_language, example) for example in examples)

    def _parse_unless_blank(self, line: str) -> Example | Rule:
        # An empty line, such as the last line of many files, is not damage.
        return self._parse(line) if line.strip() else Rule.EMPTY

    def _parse(self, line: str) -> Example | Rule:
        """Returns a line's example, or the rule that drops it.

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
                if not score >= self.min_score:  # NaN counts as a missing score.
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
            # One file ended before the other. An empty last line is not damage.
            if source is None or english is None:
                rest = english if source is None else source
                if rest == "" and not isinstance(rest, Malformed):
                    yield Row(self.language, Rule.EMPTY)
                    continue
                shorter = self.source if source is None else self.english
                differ = f"{self} differ in their number of lines"
                raise ValueError(f"{differ}: {shorter.name} ends after {number - 1}")

            # Malformed is itself a str, so it must be tested for first.
            if isinstance(source, Malformed):
                yield Row(self.language, source)
            elif isinstance(english, Malformed):
                yield Row(self.language, english)
            else:
                yield Row(self.language, Pair.of(source, english))


class JsonLines(LineFile):
    """A file with one JSON object per line; dots in a field's name lead into inner objects.

    A field may be missing in a line, whose text is then empty, but not in all lines.
    """

    @property
    def _field_names(self) -> Sequence[str]:
        """The names of the fields to read."""
        raise NotImplementedError

    def check(self) -> None:
        missing = list(self._field_names)
        known: dict[str, None] = {}
        for fields in tsv.read_lines(self.path, _parse_object):
            if isinstance(fields, Malformed):
                continue
            missing = [name for name in missing if value_at(fields, name) in (MISSING, NO_OBJECT)]
            if not missing:  # True of most files after their first line.
                return
            if len(known) < _MAX_NAMES:
                known.update(dict.fromkeys(_names(fields)))

        if known:
            names = ", ".join(itertools.islice(known, _MAX_NAMES))
            raise ValueError(
                f"{self.path}: no line has the field {', '.join(missing)}, only {names}"
            )


def _parse_object(line: str) -> dict[str, Any]:
    """Returns a line's JSON object. Raises ValueError if it is not an object."""
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise ValueError("expected a JSON object")
    return fields


def _names(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of an object's fields; the fields of inner objects have dotted names."""
    for name, value in fields.items():
        if not isinstance(value, dict):
            yield name
            continue
        for inner in _names(value):
            yield f"{name}.{inner}"


@dataclasses.dataclass(frozen=True)
class JsonlFile(JsonLines, File):
    """Pairs in two fields of JSON objects, one object per line."""

    source_field: str
    english_field: str
    split: str | None = None

    @property
    def _field_names(self) -> Sequence[str]:
        return self.source_field, self.english_field

    def _parse(self, line: str) -> Pair:
        fields = parse_json(line)
        return Pair.of(text_at(fields, self.source_field), text_at(fields, self.english_field))


@dataclasses.dataclass(frozen=True)
class PoFile(File):
    """A gettext catalog's messages; fuzzy and obsolete ones are dropped.

    For a message with plurals, the first form is the singular and the last form the plural.
    """

    split: str | None = None

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        with text_file.opened_text(self.path) as file:
            content = file.read(_MAX_CATALOG_BYTES + 1)
        if len(content) > _MAX_CATALOG_BYTES:
            raise ValueError(f"{self.path} has over {_MAX_CATALOG_BYTES >> 20} MiB, not a catalog")

        # Undecodable bytes cost only their own message, which gets a replacement character.
        charset = _CHARSET.search(content)
        encoding = "utf-8" if charset is None else charset[1].decode("ascii")
        if encoding == "CHARSET":  # The header of a template has this word.
            encoding = "utf-8"
        try:
            text = content.decode(encoding, "replace").removeprefix("\ufeff")
            # polib would treat these characters as ends of lines.
            messages = _messages(_OTHER_LINE_ENDS.sub(" ", text))
        except (OSError, LookupError, UnicodeError) as error:
            raise ValueError(f"{self.path} is not a gettext catalog: {error}") from error

        for message in messages:
            if isinstance(message, Malformed):
                yield Row(self.language, message)
                continue

            # A message with plurals has numbered forms instead of one text.
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
    """Returns a catalog's messages; a message with a syntax error is Malformed.

    Raises OSError if none of the text is a message.
    """
    try:
        return list(_parsed_catalog(text))
    except OSError as error:
        problem = error

    # Messages are separated by blank lines, so the others can be read without the damaged one.
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
    # Otherwise polib would take the last character for the missing quote.
    unterminated = _UNTERMINATED.search(text)
    if unterminated:
        raise OSError(f"no quote ends {unterminated[0].strip()[:_MAX_PRINTED_CHARS]}")
    # With the newline, polib recognizes that this is text and not a path.
    return polib.pofile(text + "\n", encoding="utf-8")


def _rule_of(message: polib.POEntry) -> Rule | None:
    """Returns the rule that drops a message of a catalog; None if the message is translated."""
    if message.obsolete:
        return Rule.OBSOLETE
    if message.fuzzy:
        return Rule.FUZZY
    return None if message.translated() else Rule.UNTRANSLATED


def parse_json(line: str) -> Any:
    """Returns a line's JSON. Raises ValueError if it is not JSON."""
    try:
        return json_records.parse(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def value_at(fields: Any, dotted: str) -> Any:
    """Returns the value of a field: None if the field, or an object around it, is null.

    Dots lead into inner objects, unless a field has dots in its own name. The value is MISSING if a
    name does not exist, and NO_OBJECT if something around the field is not an object.
    """
    if fields is None:
        return None
    if not isinstance(fields, dict):
        return NO_OBJECT
    if dotted in fields:
        return fields[dotted]

    names = dotted.split(".")
    for i in range(len(names) - 1, 0, -1):
        outer = ".".join(names[:i])
        if outer in fields:
            return value_at(fields[outer], ".".join(names[i:]))
    return MISSING


def text_at(fields: Any, dotted: str) -> str:
    """Returns the text of a field, which is empty if the field is missing or null: see `value_at`.

    Raises ValueError if the field is not text, or its text is not valid Unicode.
    """
    text = value_at(fields, dotted)
    if text is None or text is MISSING:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"field {dotted!r} is not text")
    text.encode()  # Raises ValueError: JSON can spell half of a character.
    return text
