"""Parquet files of parallel text, with named columns."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow
from pyarrow import parquet

from data_prep import sources, tsv
from data_prep.sources import Row
from data_prep.tsv import Malformed, Pair


@dataclasses.dataclass(frozen=True)
class ParquetFile(sources.Source):
    """Named columns; dots lead into structs. Spans are ranges of row groups.

    Rows without a score of at least `min_score` are dropped, if a column has one.
    """

    path: pathlib.Path
    language: str
    source_column: str
    english_column: str
    score_column: str | None = None
    min_score: float = 0.0
    split: str | None = None

    def rows(self) -> Iterator[Row]:
        return (row for span in self.spans() for row in self.rows_in(span))

    def spans(self) -> list[range]:
        with self._opened() as file:
            groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        return tsv.divide(len(groups), sum(group.total_byte_size for group in groups))

    def rows_in(self, span: range) -> Iterator[Row]:
        columns = [self.source_column, self.english_column]
        columns += [] if self.score_column is None else [self.score_column]
        with self._opened() as file:
            there = {file.schema.column(i).path for i in range(len(file.schema))}
            if missing := [name for name in columns if name not in there]:
                problem = f"{self.path} has no column {', '.join(missing)}"
                raise ValueError(f"{problem}: there is {', '.join(sorted(there))}")
            try:
                batches = file.iter_batches(row_groups=list(span), columns=columns)
                records = (record for batch in batches for record in batch.to_pylist())
                for number, record in enumerate(records, start=1):
                    yield Row(self.language, self._pair(number, record))
            except (pyarrow.ArrowException, OSError) as error:
                raise _not_parquet(self.path, error) from error

    def _pair(self, number: int, record: dict[str, Any]) -> Pair | Malformed | None:
        if self.score_column is not None:
            score = sources.value_at(record, self.score_column)
            if score is None or score < self.min_score:
                return None
        try:
            sides = (self.source_column, self.english_column)
            return Pair.of(*(sources.text_at(record, side) for side in sides))
        except ValueError as error:
            return Malformed(number, str(error))

    def _opened(self) -> parquet.ParquetFile:
        if not self.path.is_file():
            raise ValueError(f"no file {self.path}")
        try:
            return parquet.ParquetFile(self.path)
        except (pyarrow.ArrowException, OSError) as error:
            raise _not_parquet(self.path, error) from error


def _not_parquet(path: pathlib.Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is no whole Parquet file: {' '.join(str(error).split())}")
