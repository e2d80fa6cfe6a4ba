"""Lines of text files, plain or gzip, as they are read by the formats that have one pair a line."""

import dataclasses
import gzip
import pathlib
import zlib
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A line that cannot be used: its number, from 1, and what is wrong with it."""

    number: int
    reason: str


def read(path: pathlib.Path) -> Iterator[str | Malformed]:
    """Yields the lines without their ends; what is not UTF-8 is Malformed.

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
