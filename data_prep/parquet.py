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

    If there is a column of scores, rows with less than `min_score`, or without one, are dropped.
    """

    source_column: str
    english_column: str
    score_column: str | None = None
    min_score: float = 0.0
    split: str | None = None

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
        columns = [self.source_column, self.english_column]
        if self.score_column is not None:
            columns.append(self.score_column)

        with self._opened() as file:
            # Columns in structs have paths with dots, as the settings do.
            known = sorted({file.schema.column(i).path for i in range(len(file.schema))})
            missing = ", ".join(name for name in columns if name not in known)
            if missing:
                raise ValueError(f"{self.path} has no column {missing}, only {', '.join(known)}")

            # A span of all rows ends far behind the last group.
            row_groups = range(span.start, min(span.stop, file.num_row_groups))
            for batch in file.iter_batches(row_groups=row_groups, columns=columns):
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
        source = sources.text_at(record, self.source_column)
        english = sources.text_at(record, self.english_column)
        return Pair.of(source, english)
