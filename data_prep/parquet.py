"""Parquet files of pairs in named columns; documents.py reads documents from such files."""

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
        """Returns the names of the columns to read."""
        raise NotImplementedError

    def _example(self, record: dict[str, Any]) -> Example | Rule:
        """Returns the example of a row, or the rule that drops it.

        Raises ValueError if a value of the row is not text.
        """
        raise NotImplementedError

    def spans(self) -> list[range]:
        """Returns ranges of row groups, each with about as many bytes as a span of plain text."""
        # A row group is the smallest part that can be read by itself.
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
            self._check_columns(file, columns)

            # The span of a whole file ends far beyond the last group.
            row_groups = range(span.start, min(span.stop, file.num_row_groups))
            for batch in file.iter_batches(row_groups=row_groups, columns=list(columns)):
                for record in batch.to_pylist():
                    yield Row(self._row_language, tsv.parsed(record, self._example))

    def sampled_rows(self) -> Iterator[Row]:
        # A row group is read as a whole, so only a few of them are sampled.
        with self._opened() as file:
            num_groups = file.num_row_groups
        num_samples = min(num_groups, _SAMPLED_GROUPS)
        for i in range(num_samples):
            group = i * num_groups // num_samples
            yield from self.rows(range(group, group + 1))

    def _check_columns(self, file: parquet.ParquetFile, columns: Sequence[str]) -> None:
        """Raises ValueError if the file does not have each of the columns exactly once."""
        # Columns in structs have paths with dots, like the settings.
        paths = [file.schema.column(i).path for i in range(len(file.schema))]
        missing = ", ".join(name for name in columns if name not in paths)
        if missing:
            known = ", ".join(sorted(set(paths)))
            raise ValueError(f"{self.path} has no column {missing}, only {known}")

        fields = list(file.schema_arrow)
        repeated = [name for name in columns if paths.count(name) > 1 or _is_repeated(name, fields)]
        if repeated:
            raise ValueError(
                f"{self.path} has more than one column {', '.join(repeated)}, expected one of each "
                "name"
            )

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


def _is_repeated(column: str, fields: Sequence[pyarrow.Field]) -> bool:
    """Returns whether two fields have the same name at some level of a column's path."""
    leading = [field for field in fields if f"{column}.".startswith(f"{field.name}.")]
    if len({field.name for field in leading}) < len(leading):
        return True

    for field in leading:
        inner = column.removeprefix(field.name).removeprefix(".")
        if inner and pyarrow.types.is_struct(field.type):
            of_struct = [field.type.field(i) for i in range(field.type.num_fields)]
            if _is_repeated(inner, of_struct):
                return True
    return False


@dataclasses.dataclass(frozen=True)
class ParquetFile(Table, sources.File):
    """Pairs in named columns.

    If there is a column of scores, rows with a score below `min_score`, or none, are dropped.
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
            if score is None:
                return Rule.LOW_SCORE
            try:
                number = float(score)
            except TypeError as error:  # For example, a date.
                raise ValueError(f"column {self.score_column!r} is not a number") from error
            if not number >= self.min_score:  # NaN counts as a missing score.
                return Rule.LOW_SCORE
        source = sources.text_at(record, self.source_column)
        english = sources.text_at(record, self.english_column)
        return Pair.of(source, english)
