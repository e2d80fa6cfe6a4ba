"""Parquet files of parallel text, with named columns."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pyarrow
from pyarrow import parquet

from data_prep import sources, tsv
from data_prep.sources import Row
from data_prep.tsv import Pair


@dataclasses.dataclass(frozen=True)
class ParquetFile(sources.File):
    """Named columns; dots lead into structs.

    Rows without a score of at least `min_score` are dropped, if a column has one.
    """

    source_column: str
    english_column: str
    score_column: str | None = None
    min_score: float = 0.0
    split: str | None = None

    def spans(self) -> list[range]:
        """Returns ranges of row groups, each of about as many bytes as a span of plain text."""
        with self._opened() as file:
            sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
        groups = tsv.grouped(range(len(sizes)), sizes, tsv.BYTES_PER_SPAN)
        return [range(each[0], each[-1] + 1) for each in groups] or [tsv.WHOLE]

    def rows(self, span: range = tsv.WHOLE) -> Iterator[Row]:
        names = self.source_column, self.english_column, self.score_column
        wanted = [name for name in names if name is not None]
        with self._opened() as file:
            there = {file.schema.column(i).path for i in range(len(file.schema))}
            if missing := ", ".join(name for name in wanted if name not in there):
                columns = ", ".join(sorted(there))
                raise ValueError(f"{self.path} has no column {missing}, only {columns}")
            groups = range(span.start, min(span.stop, file.num_row_groups))
            for batch in file.iter_batches(row_groups=groups, columns=wanted):
                for record in batch.to_pylist():
                    yield Row(self.language, tsv.parsed(record, self._pair))

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

    def _pair(self, record: dict[str, Any]) -> Pair | None:
        if self.score_column is not None:
            score = sources.value_at(record, self.score_column)
            if score is None or not float(score) >= self.min_score:  # NaN is no score.
                return None
        sides = (self.source_column, self.english_column)
        return Pair.of(*(sources.text_at(record, side) for side in sides))
