"""Parallel text with one pair a line, plain or gzip: `source<TAB>english`."""

import dataclasses
import gzip
import pathlib
import zlib
from collections.abc import Iterable, Iterator


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
    def line(self) -> str:
        """The pair as a line of TSV, with the line break."""
        return f"{self.source}\t{self.english}\n"


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A line that cannot be used: its number, from 1, and what is wrong with it."""

    number: int
    reason: str


def read(path: pathlib.Path) -> Iterator[Pair | Malformed]:
    """Yields the pairs; a line that is not UTF-8, or has no tab or several, is Malformed.

    Raises:
        ValueError: as read_lines.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if isinstance(line, Malformed):
            yield line
            continue
        sides = line.split("\t")
        if len(sides) == 2:
            yield Pair(sides[0].strip(), sides[1].strip())
        else:
            yield Malformed(number, f"expected 1 tab, given {len(sides) - 1}")


def read_lines(path: pathlib.Path) -> Iterator[str | Malformed]:
    """Yields the lines of a text file without their ends; one that is not UTF-8 is Malformed.

    Raises:
        ValueError: no such file, corrupt gzip, or binary content (a NUL byte).
    """
    for number, line in enumerate(_read_bytes(path), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            yield Malformed(number, f"not UTF-8: {error.reason} at byte {error.start}")
        else:
            yield text.removeprefix("\ufeff").rstrip("\r\n")


def _read_bytes(path: pathlib.Path) -> Iterator[bytes]:
    if not path.is_file():
        raise ValueError(f"no file {path}")
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        try:
            for line in file:
                if b"\0" in line:
                    raise ValueError(f"{path} is binary: it holds a NUL byte, expected text")
                yield line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is corrupt gzip: {error}") from error


def write(path: pathlib.Path, pairs: Iterable[Pair]) -> None:
    """Writes a gzip file whose bytes depend on the pairs alone (no name, no time)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        path.open("wb") as file,
        gzip.GzipFile(fileobj=file, filename="", mode="wb", compresslevel=6, mtime=0) as text,
    ):
        for pair in pairs:
            text.write(pair.line.encode("utf-8"))
