"""Files with one pair per line, `source<TAB>english`, or one document per line, plain or gzip."""

import collections
import dataclasses
import gzip
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from lingvo_gshard.files import text_file
from xla_spmd.files import atomic_file

WHOLE = range(sys.maxsize)  # The span of a whole file.
BYTES_PER_SPAN = 1 << 26  # The text of one task.
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sentence and its English translation. Neither contains a tab or a line break."""

    source: str
    english: str

    @staticmethod
    def of(source: str, english: str) -> "Pair":
        """Returns a pair of any two texts, with white space collapsed."""
        return Pair(" ".join(source.split()), " ".join(english.split()))

    @property
    def sides(self) -> tuple[str, ...]:
        """The texts, English last."""
        return self.source, self.english

    @property
    def line(self) -> str:
        """The pair as a line of TSV, with the line break."""
        return f"{self.source}\t{self.english}\n"


@dataclasses.dataclass(frozen=True)
class Document:
    """A text in one language, without a tab or a line break."""

    text: str

    @staticmethod
    def of(text: str) -> "Document":
        """Returns a document of any text, with white space collapsed."""
        return Document(" ".join(text.split()))

    @property
    def sides(self) -> tuple[str, ...]:
        """The text, as the only side."""
        return (self.text,)

    @property
    def line(self) -> str:
        """The document as a line, with the line break."""
        return f"{self.text}\n"


Example = Pair | Document  # An example of either kind of data.


def with_sides(example: Example, sides: Iterable[str]) -> Example:
    """Returns an example of the same kind with other texts."""
    return type(example)(*sides)


def of_line(line: str) -> Example:
    """Returns the example in a `line`; a tab means that it is a pair."""
    sides = line.rstrip("\n").split("\t")
    return Document(*sides) if len(sides) == 1 else Pair(*sides)


class Malformed(str):
    """The problem with a line, or another row, that cannot be used."""


def read(path: pathlib.Path) -> Iterator[Pair | Malformed]:
    """Yields the pairs of a file; a line without exactly one tab is Malformed.

    Raises ValueError if the file is missing or is not text.
    """
    return read_lines(path, parse)


def parse(line: str) -> Pair:
    """Returns the pair in a line. Raises ValueError if it does not have exactly one tab."""
    sides = line.split("\t")
    if len(sides) != 2:
        raise ValueError(f"expected 1 tab, got {len(sides) - 1}")
    source, english = map(_in_one_line, sides)
    return Pair(source, english)


def _in_one_line(text: str) -> str:
    """Returns a text without line breaks of any kind, so that files have one line for each."""
    return " ".join(text.splitlines()).strip()


def grouped(items: Sequence[_T], sizes: Iterable[int], per_group: int) -> list[list[_T]]:
    """Divides items, in order, into groups of about equal size, by each item's size.

    The items are laid end to end. An item that begins before `per_group` is in the first group, one
    that begins before 2 * per_group in the second, and so on; empty groups are left out.
    """
    groups: dict[int, list[_T]] = collections.defaultdict(list)
    start = 0
    for item, size in zip(items, sizes, strict=True):
        groups[start // per_group].append(item)
        start += size
    return list(groups.values())


def read_lines(
    path: pathlib.Path, parse: Callable[[str], _T], span: range = WHOLE
) -> Iterator[_T | Malformed]:
    """Yields parse(line) for each line of a text file that begins in a span of its bytes.

    Lines are passed to `parse` without their ends. A line is Malformed if it is not UTF-8, has a
    NUL byte, or makes `parse` raise ValueError. Raises ValueError if the file is missing, ends
    before the span does, or is not text: see text_file.py.
    """

    def decode(line: bytes) -> _T:
        text_file.check_line(len(line), "it")
        if b"\0" in line:
            raise ValueError("it has a NUL byte")
        # Windows editors begin a file with a byte order mark.
        return parse(line.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n"))

    with text_file.opened_text(path) as file:
        for line in _lines(path, file, span):
            yield parsed(line, decode)


def _lines(path: pathlib.Path, file: text_file.BinaryFile, span: range) -> Iterator[bytes]:
    """Yields the lines that begin in a span of a file's bytes; only a part of very long ones."""
    position = 0
    if span.start > 0:
        # The line with the byte before the span belongs to the span before: skip the rest of it.
        position = file.seek(span.start - 1)
        position += _skip_line(file)

    limit = text_file.MAX_LINE_BYTES + 1
    while position < span.stop:
        line = file.readline(limit)
        if not line:
            break
        yield line
        position += len(line)

        # The rest of a line that is too long is skipped.
        if len(line) == limit and not line.endswith(b"\n"):
            position += _skip_line(file)

    # The file has become shorter. The span WHOLE does not depend on the file's size.
    if position < span.stop and span != WHOLE:
        raise ValueError(f"{path} has {position} bytes, fewer than when the run began")


def _skip_line(file: text_file.BinaryFile) -> int:
    """Reads to the end of a line, however long it is; returns the number of bytes."""
    num_bytes = 0
    while True:
        part = file.readline(text_file.MAX_LINE_BYTES)
        num_bytes += len(part)
        if not part or part.endswith(b"\n"):
            return num_bytes


def parsed(row: Any, parse: Callable[[Any], _T]) -> _T | Malformed:
    """Returns parse(row) or, if that raises ValueError, the problem as Malformed."""
    try:
        return parse(row)
    except UnicodeDecodeError as error:
        return Malformed(f"not UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return Malformed(str(error))


def write(path: pathlib.Path, examples: Iterable[Example]) -> None:
    """Writes a gzip file whose bytes depend only on the examples: without a name and a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_file.replacing(path, is_shared=True) as partial,
        partial.open("wb") as file,
        gzip.GzipFile(fileobj=file, filename="", mode="wb", compresslevel=6, mtime=0) as text,
    ):
        for example in examples:
            text.write(example.line.encode("utf-8"))
