"""Reading and writing parallel text: `source<TAB>english`, one pair a line, plain or gzip."""

import dataclasses
import gzip
import pathlib
import zlib
from collections.abc import Iterable, Iterator

from absl import logging

_LOGGED_LINES_PER_FILE = 10


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sentence and its English translation, neither empty."""

    source: str
    english: str


@dataclasses.dataclass(frozen=True)
class ParallelText:
    """The pairs of one file in its order, and how many of its lines were not pairs."""

    pairs: list[Pair]
    num_malformed: int


def read(path: pathlib.Path, max_malformed_share: float) -> ParallelText:
    """Reads a file; a malformed line is logged with its number, skipped and counted.

    A line is malformed if it is not UTF-8, has not exactly one tab, or has an empty side.

    Raises:
        ValueError: corrupt gzip, binary content (a NUL byte), or a share of malformed lines over
            `max_malformed_share`.
    """
    pairs: list[Pair] = []
    num_malformed = 0
    for number, line in enumerate(_lines(path), start=1):
        parsed = _parse(line)
        if isinstance(parsed, Pair):
            pairs.append(parsed)
            continue
        num_malformed += 1
        if num_malformed <= _LOGGED_LINES_PER_FILE:
            logging.warning("%s:%d: skipped: %s", path, number, parsed)
    _check_share(path, num_malformed, len(pairs) + num_malformed, max_malformed_share)
    return ParallelText(pairs, num_malformed)


def write(path: pathlib.Path, pairs: Iterable[Pair]) -> None:
    """Writes a gzip file whose bytes depend on the pairs alone (no name, no time)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{pair.source}\t{pair.english}\n" for pair in pairs)
    path.write_bytes(gzip.compress(lines.encode("utf-8"), compresslevel=6, mtime=0))


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    open_file = gzip.open if path.suffix == ".gz" else open
    with open_file(path, "rb") as file:
        try:
            for line in file:
                if b"\0" in line:
                    raise ValueError(f"{path} is binary: it holds a NUL byte, expected text")
                yield line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is corrupt gzip: {error}") from error


def _parse(line: bytes) -> Pair | str:
    """Returns the pair, or what is wrong with the line."""
    try:
        text = line.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    num_tabs = text.count("\t")
    if num_tabs != 1:
        return f"expected 1 tab, given {num_tabs}"
    source, english = (side.strip() for side in text.split("\t"))
    if not source or not english:
        return "the source is empty" if not source else "the English is empty"
    return Pair(source, english)


def _check_share(path: pathlib.Path, num_malformed: int, num_lines: int, limit: float) -> None:
    if num_malformed > _LOGGED_LINES_PER_FILE:
        logging.warning("%s: %d malformed lines in all", path, num_malformed)
    if num_malformed > limit * num_lines:
        raise ValueError(
            f"{path}: {num_malformed} of {num_lines} lines are malformed "
            f"({num_malformed / num_lines:.1%}), expected at most {limit:.1%}"
        )
