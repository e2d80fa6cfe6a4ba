"""Parallel text as `source<TAB>english`, one pair a line, plain or gzip."""

import dataclasses
import gzip
import pathlib
from collections.abc import Iterable, Iterator

from data_prep import lines


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sentence and its English translation. Neither holds a tab or the end of a line."""

    source: str
    english: str

    @staticmethod
    def of(source: str, english: str) -> "Pair":
        """A pair of any two texts, white space collapsed."""
        return Pair(" ".join(source.split()), " ".join(english.split()))


def read(path: pathlib.Path) -> Iterator[Pair | lines.Malformed]:
    """Yields the pairs; a line with another number of tabs than one, or not UTF-8, is Malformed.

    Raises:
        ValueError: as lines.read.
    """
    for number, line in enumerate(lines.read(path), start=1):
        if isinstance(line, lines.Malformed):
            yield line
            continue
        sides = line.split("\t")
        if len(sides) == 2:
            yield Pair(sides[0].strip(), sides[1].strip())
        else:
            yield lines.Malformed(number, f"expected 1 tab, given {len(sides) - 1}")


def line_of(pair: Pair) -> str:
    """The pair's line, with its end."""
    return f"{pair.source}\t{pair.english}\n"


def write(path: pathlib.Path, pairs: Iterable[Pair]) -> None:
    """Writes a gzip file whose bytes depend on the pairs alone (no name, no time)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        path.open("wb") as file,
        gzip.GzipFile(fileobj=file, filename="", mode="wb", compresslevel=6, mtime=0) as text,
    ):
        for pair in pairs:
            text.write(line_of(pair).encode("utf-8"))
