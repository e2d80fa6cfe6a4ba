"""Parquet files with named columns. Those of documents are in documents.py."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow
from pyarrow import parquet

from data_prep import sources, tsv
from data_prep.rules import Rule
from data_prep.sources import Row, Source
from data_prep.tsv import Example, Pair

_SAMPLED_GROUPS = 16


class Table(Source):
    """A file of row groups; dots in a column's name lead into structs."""

    path: pathlib.Path

    def _columns(self) -> Sequence[str]:
        """Returns the names of the columns that are read."""
        raise NotImplementedError

    def _example(self, record: dict[str, Any]) -> Example | Rule:
        """Returns what a row holds, or why nothing. Raises ValueError without text."""
        raise NotImplementedError

    def spans(self) -> list[range]:
        """Returns ranges of row groups, each of about as many bytes as a span of plain text."""
        # A row group is the least that can be read by itself.
        with self._opened() as file:
            row_groups = range(file.num_row_groups)
            sizes = [file.metadata.row_group(i).total_byte_size for i in row_groups]

        spans = []
        for indices in tsv.grouped(row_groups, sizes, tsv.BYTES_PER_SPAN):
            spans.append(range(indices[0], indices[-1] + 1))
        return spans or [tsv.WHOLE]

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        columns = self._columns()
        with self._opened() as file:
            # Columns in structs have paths with dots, as the settings do.
            known = sorted({file.schema.column(i).path for i in range(len(file.schema))})
            missing = ", ".join(name for name in columns if name not in known)
            if missing:
                raise ValueError(f"{self.path} has no column {missing}, only {', '.join(known)}")

            # A span of all rows ends far behind the last group.
            row_groups = range(span.start, min(span.stop, file.num_row_groups))
            for batch in file.iter_batches(row_groups=row_groups, columns=list(columns)):
                for record in batch.to_pylist():
                    yield Row(self._row_language, tsv.parsed(record, self._example))

    def sampled_rows(self) -> Iterator[Row]:
        # A row group is read as a whole, so few of them are.
        with self._opened() as file:
            num_groups = file.num_row_groups
        num_samples = min(num_groups, _SAMPLED_GROUPS)
        for i in range(num_samples):
            group = i * num_groups // num_samples
            yield from self.rows(range(group, group + 1))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[parquet.ParquetFile]:
        if not self.path.is_file():
            raise ValueError(f"{self.path}: there is no such file")
        try:
            with parquet.ParquetFile(self.path) as file:
                yield file
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.path} is not a whole Parquet file: {reason}") from error


@dataclasses.dataclass(frozen=True)
class ParquetFile(Table, sources.File):
    """Pairs in named columns.

    If there is a column of scores, rows with less than `min_score`, or without one, are dropped.
    """

    source_column: str
    english_column: str
    score_column: str | None = None
    min_score: float = 0.0
    split: str | None = None

    def _columns(self) -> Sequence[str]:
        columns = [self.source_column, self.english_column]
        if self.score_column is not None:
            columns.append(self.score_column)
        return columns

    def _example(self, record: dict[str, Any]) -> Pair | Rule:
        if self.score_column is not None:
            score = sources.value_at(record, self.score_column)
            if score is None or score is sources.MISSING:
                return Rule.LOW_SCORE
            try:
                number = float(score)
            except TypeError as error:  # Such as a date.
                raise ValueError(f"no number in column {self.score_column!r}") from error
            if not number >= self.min_score:  # NaN is no score.
                return Rule.LOW_SCORE
        source = sources.text_at(record, self.source_column)
        english = sources.text_at(record, self.english_column)
        return Pair.of(source, english)
