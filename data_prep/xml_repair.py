"""XML with a few damaged characters, which would end a parser's work, as XML that it reads."""

import codecs
import re
from typing import Protocol

_REPLACEMENT = b"&#xFFFD;"  # In ASCII, so that it is right in every encoding of the file.
# What may be a reference to a character that XML does not have, or is such a character.
_DAMAGE = re.compile(rb"&#(x[0-9a-fA-F]+|[0-9]+);|[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
_MAX_REFERENCE_BYTES = 32
_ENCODING = re.compile(rb"""<\?xml[^>]*\sencoding\s*=\s*["']([\w.-]+)""")
# What UTF-16 and UTF-32 begin with, with or without their mark.
_WIDE = (b"\xff\xfe", b"\xfe\xff", b"\0", b"<\0")


class Readable(Protocol):
    """A file of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Returns up to so many bytes."""
        ...


class Repaired:
    """A file of bytes with a replacement character for each that XML cannot hold.

    These are bytes that are not UTF-8, in a file that is, and characters such as NUL, also as
    references. Files in UTF-16 and UTF-32 are left as they are.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._unfinished = b""  # The beginning of what may be a reference.
        self._has_begun = False
        self._is_wide = False
        self._decoder: codecs.IncrementalDecoder | None = None

    def read(self, size: int = -1) -> bytes:
        """Returns about so many bytes; none at the end."""
        while True:
            data = self._file.read(size)
            is_end = not data or size < 0
            if not self._has_begun:
                self._begin(data)
            if self._is_wide:
                return data

            if self._decoder is not None:
                data = self._decoder.decode(data, is_end).encode()
            data = self._unfinished + data
            self._unfinished = b""

            # A reference may go on in the next bytes.
            start = data.rfind(b"&", max(0, len(data) - _MAX_REFERENCE_BYTES))
            if not is_end and start != -1 and b";" not in data[start:]:
                self._unfinished = data[start:]
                data = data[:start]
            if data or is_end:
                return _DAMAGE.sub(_repaired, data)

    def _begin(self, data: bytes) -> None:
        """Finds the encoding from a file's first bytes."""
        self._has_begun = True
        self._is_wide = data.startswith(_WIDE)
        declared = _ENCODING.search(data[:200])
        if declared is None or declared[1].lower() in (b"utf-8", b"utf8"):
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")


def _repaired(match: re.Match[bytes]) -> bytes:
    """Returns a reference that XML allows, or the replacement character for anything else."""
    reference = match[1]
    if reference is None:
        return _REPLACEMENT
    code = int(reference[1:], 16) if reference.startswith(b"x") else int(reference)
    is_allowed = code in (0x9, 0xA, 0xD) or 0x20 <= code < 0xD800 or 0xE000 <= code < 0xFFFE
    return match[0] if is_allowed or 0x10000 <= code < 0x110000 else _REPLACEMENT
