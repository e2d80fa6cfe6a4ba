"""Formats of text in one language, as streams of rows with one document each.

`corpus` is the name of the corpus: the manifest counts documents under it, evaluation reports a
loss for it, and cleaning takes it as the language if it is a language's code.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from data_prep import languages, parquet, sources, tsv
from data_prep.multilingual import TfdsSource
from data_prep.sources import LineFile, Row, Source
from data_prep.tsv import Document, Malformed, Pair
from lingvo_gshard.input.manifest import Kind

DOCUMENTS = ("line", "block")  # The extent of a document in plain text: see TextFile.
SIDES = ("source", "english")


@dataclasses.dataclass(frozen=True)
class _CorpusFile(Source):
    """A file of one corpus's documents."""

    kind: ClassVar[Kind] = Kind.TEXT
    path: pathlib.Path
    corpus: str

    @property
    def _row_language(self) -> str:
        return self.corpus


@dataclasses.dataclass(frozen=True)
class TextFile(LineFile, _CorpusFile):
    """Plain text, or gzip: a `document` is a "line", or a "block" of lines up to a blank one."""

    document: str
    split: str | None = None

    def spans(self) -> list[range]:
        # Two ranges of bytes may share a block.
        return super().spans() if self.document == "line" else [tsv.WHOLE]

    def sampled_rows(self) -> Iterator[Row]:
        return super().sampled_rows() if self.document == "line" else self.rows()

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        if self.document == "line":
            yield from super().rows(span)
            return

        block: list[str] = []
        for line in tsv.read_lines(self.path, str):
            if line.strip():
                block.append(line)
            elif block:
                yield Row(self.corpus, _joined(block))
                block = []
        if block:
            yield Row(self.corpus, _joined(block))

    def _parse(self, line: str) -> Document:
        return Document.of(line)


def _joined(lines: Sequence[str]) -> Document | Malformed:
    """Returns the document in some lines; if a line is malformed, so is the document."""
    for line in lines:
        if isinstance(line, Malformed):
            return line
    return Document.of(" ".join(lines))


@dataclasses.dataclass(frozen=True)
class JsonlDocuments(sources.JsonLines, _CorpusFile):
    """One JSON object per line, with the text in a field."""

    field: str
    split: str | None = None

    @property
    def _field_names(self) -> Sequence[str]:
        return (self.field,)

    def _parse(self, line: str) -> Document:
        return Document.of(sources.text_at(sources.parse_json(line), self.field))


@dataclasses.dataclass(frozen=True)
class ParquetDocuments(parquet.Table, _CorpusFile):
    """A table with the text in a column; dots in the column's name lead into structs."""

    column: str
    split: str | None = None

    def _columns(self) -> Sequence[str]:
        return [self.column]

    def _example(self, record: dict[str, Any]) -> Document:
        return Document.of(sources.text_at(record, self.column))


@dataclasses.dataclass(frozen=True)
class TfdsDocuments(TfdsSource):
    """A TensorFlow Datasets data set with the text in a feature, such as wiki40b or c4."""

    kind: ClassVar[Kind] = Kind.TEXT
    name: str
    tfds_split: str
    corpus: str
    feature: str
    data_dir: pathlib.Path | None = None
    split: str | None = None

    def _rows_of(self, example: dict[str, Any]) -> Iterable[Row]:
        text = example.get(self.feature)
        if not isinstance(text, bytes):
            known = ", ".join(sorted(example))
            raise ValueError(f"{self} has no text in feature {self.feature!r}, only {known}")
        return [Row(self.corpus, tsv.parsed(text, _decoded))]


def _decoded(text: bytes) -> Document:
    return Document.of(text.decode())


@dataclasses.dataclass(frozen=True)
class OneSide(Source):
    """One side, "source" or "english", of a source of pairs.

    Without a `corpus`, the corpus of a document is the language of its side.
    """

    kind: ClassVar[Kind] = Kind.TEXT
    pairs: Source
    side: str
    corpus: str | None
    split: str | None

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        return self.pairs.files

    def __str__(self) -> str:
        return str(self.pairs)

    def spans(self) -> list[range]:
        return self.pairs.spans()

    def check(self) -> None:
        self.pairs.check()

    def sampled_rows(self) -> Iterator[Row]:
        return self._of_side(self.pairs.sampled_rows())

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        return self._of_side(self.pairs.rows(span))

    def _of_side(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            language = languages.sides(row.language)[0 if self.side == "source" else 1]
            example = row.example
            if isinstance(example, Pair):
                example = Document(example.source if self.side == "source" else example.english)
            yield Row(self.corpus or language, example)
