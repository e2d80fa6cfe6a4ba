"""Formats of one pair a line: TSV, Moses' two files side by side, and JSON lines."""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from data_prep import lines, tsv
from data_prep.lines import Malformed
from data_prep.sources.source import BadRow, Row


@dataclasses.dataclass(frozen=True)
class TsvFile:
    """`source<TAB>english` lines, plain or gzip."""

    path: pathlib.Path
    language: str
    split: str | None = None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return (self.path,)

    def __str__(self) -> str:
        return str(self.path)

    def rows(self) -> Iterator[Row | BadRow]:
        """See Source."""
        for pair in tsv.read(self.path):
            yield _row(self.language, pair)


@dataclasses.dataclass(frozen=True)
class MosesFiles:
    """Two files, plain or gzip, whose lines with the same number are translations."""

    source: pathlib.Path
    english: pathlib.Path
    language: str
    split: str | None = None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return (self.source, self.english)

    def __str__(self) -> str:
        return f"{self.source} and {self.english}"

    def rows(self) -> Iterator[Row | BadRow]:
        """See Source; ValueError also if one file has more lines."""
        both = itertools.zip_longest(lines.read(self.source), lines.read(self.english))
        for number, (source, english) in enumerate(both, start=1):
            if source is None or english is None:
                shorter = self.source if source is None else self.english
                raise ValueError(
                    f"{self.source} and {self.english} differ in their number of lines: "
                    f"{shorter.name} ends after {number - 1}"
                )
            yield _row(self.language, _joined(source, english))


@dataclasses.dataclass(frozen=True)
class JsonlFile:
    """A JSON object a line, plain or gzip; the sides are fields, dotted where they lie deeper."""

    path: pathlib.Path
    language: str
    source_field: str
    english_field: str
    split: str | None = None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return (self.path,)

    def __str__(self) -> str:
        return str(self.path)

    def rows(self) -> Iterator[Row | BadRow]:
        """See Source."""
        for number, line in enumerate(lines.read(self.path), start=1):
            pair = line if isinstance(line, Malformed) else self._parse(number, line)
            yield _row(self.language, pair)

    def _parse(self, number: int, line: str) -> tsv.Pair | Malformed:
        try:
            fields = json.loads(line)
            sides = [_field(fields, name) for name in (self.source_field, self.english_field)]
        except json.JSONDecodeError as error:
            return Malformed(number, f"not JSON: {error}")
        except KeyError as error:
            return Malformed(number, f"no text in field {error}")
        return tsv.Pair.of(*sides)


def _row(language: str, pair: tsv.Pair | Malformed) -> Row | BadRow:
    if isinstance(pair, Malformed):
        return BadRow(language, pair.number, pair.reason)
    return Row(language, pair)


def _joined(source: str | Malformed, english: str | Malformed) -> tsv.Pair | Malformed:
    if isinstance(source, Malformed):
        return source
    return english if isinstance(english, Malformed) else tsv.Pair.of(source, english)


def _field(fields: Any, dotted: str) -> str:
    found = fields
    for name in dotted.split("."):
        if not isinstance(found, dict) or name not in found:
            raise KeyError(dotted)
        found = found[name]
    if not isinstance(found, str):
        raise KeyError(dotted)
    return found
