"""Text files, however they are read: UTF-8, plain or, if the name ends in .gz, gzip.

A file that is certainly not text is refused before any of it is read as text, with a message that
names its format.
"""

import codecs
import contextlib
import gzip
import io
import pathlib
import re
import zlib
from collections.abc import Iterator

from xla_spmd.files import atomic_file

BinaryFile = gzip.GzipFile | io.BufferedReader
HEAD_BYTES = 1 << 12  # The beginning of a file, from which its format is recognized.
# More than any line of text has; a small gzip file may contain one too large for any memory.
MAX_LINE_BYTES = 1 << 26
# (first bytes, format, how to make text of it)
_OTHER_FORMATS = (
    (rb"\x1f\x8b", "gzip", "name it .gz, or decompress it"),
    (rb"BZh[1-9]1AY&SY", "bzip2", "decompress it"),
    (rb"\xfd7zXZ\0", "xz", "decompress it"),
    (rb"\x28\xb5\x2f\xfd", "zstd", "decompress it"),
    (rb"PK\x03\x04", "zip", "unpack it"),
    # UTF-32's mark begins with UTF-16's, so it comes first.
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32", "iconv -f UTF-32 -t UTF-8 converts it"),
    # The mark alone may be damage, but white space and ASCII have NUL bytes in UTF-16.
    (rb"(?s)(\xff\xfe|\xfe\xff).*?\0", "UTF-16", "iconv -f UTF-16 -t UTF-8 converts it"),
)
# A single NUL byte is damage to its line, but this many mean UTF-16, or a binary file.
_MIN_NULS = 4
_MIN_NUL_SHARE = 0.1


def check_head(head: bytes, name: str) -> None:
    """Raises ValueError if a file, which messages call `name`, is not text by its first bytes."""
    for beginning, format_name, advice in _OTHER_FORMATS:
        if re.match(beginning, head):
            raise ValueError(f"{name} is {format_name}, expected text in UTF-8: {advice}")

    num_nuls = head.count(b"\0")
    if num_nuls >= max(_MIN_NULS, _MIN_NUL_SHARE * len(head)):
        raise ValueError(
            f"{name} is binary: {num_nuls} of its first {len(head)} bytes are NUL, expected text "
            "in UTF-8"
        )


def check_line(num_bytes: int, name: str) -> None:
    """Raises ValueError if a line, which messages call `name`, is too long to be read."""
    if num_bytes > MAX_LINE_BYTES:
        raise ValueError(f"{name} has over {MAX_LINE_BYTES >> 20} MiB, expected a line of text")


def is_same_as_utf8(charset: str) -> bool:
    """Returns whether text in a charset, which Python knows, is also UTF-8."""
    return codecs.lookup(charset).name in ("utf-8", "ascii")


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[BinaryFile]:
    """Opens a file, plain or gzip. Raises ValueError if it is missing or is corrupt gzip."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")

    open_file = gzip.open if path.suffix == ".gz" else open
    with atomic_file.naming(path), open_file(path, "rb") as file:
        try:
            yield file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is corrupt gzip: {error}") from error


@contextlib.contextmanager
def opened_text(path: pathlib.Path) -> Iterator[BinaryFile]:
    """Opens a text file. Raises ValueError if it is missing, is corrupt gzip, or is not text."""
    with opened(path) as file:
        check_head(file.read(HEAD_BYTES), str(path))
        file.seek(0)
        yield file
