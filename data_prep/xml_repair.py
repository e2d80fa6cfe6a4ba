"""XML with a few damaged characters, which would end a parser's work, as XML that it reads."""

import codecs
import html.entities
import re
from typing import Protocol

_REPLACEMENT = b"&#xFFFD;"  # In ASCII, so that it is right in every encoding of the file.
# What may be a reference to a character that XML does not have, or is such a character.
_NO_CHARACTER = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
_DAMAGE = re.compile(rb"&#(x[0-9a-fA-F]+|[0-9]+);|" + _NO_CHARACTER.pattern)
# What XML itself names; HTML has many more names, which only a DTD would tell a parser.
_NAMED = (b"amp", b"lt", b"gt", b"quot", b"apos")
# A reference, or an ampersand that begins none; and what begins no element.
_MARKUP = re.compile(
    rb"&(?!#(?:x[0-9a-fA-F]+|[0-9]+);)(?:([A-Za-z]\w*);)?|<(?![A-Za-z_:/!?\x80-\xff])"
)
# Between these, text is no markup.
_CDATA_BEGIN = b"<![CDATA["
_CDATA_END = b"]]>"
_CDATA_BOUNDS = re.compile(rb"(<!\[CDATA\[|\]\]>)")
# The beginning, at the end of some bytes, of what is looked for in them.
_UNFINISHED = re.compile(rb"(?:&#?\w*|<(?:!(?:\[[CDAT]{0,5})?)?|\]{1,2})\Z")
_MAX_UNFINISHED_BYTES = 40
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
    references. In a file in UTF-8, `&` and `<` that are no markup become text, and names of HTML
    such as `&nbsp;` the characters that they are for. Files in UTF-16 and UTF-32 are left as they
    are.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._unfinished = b""  # The beginning of what may be a reference or other markup.
        self._is_in_cdata = False
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

            # It may go on in the next bytes.
            found = _UNFINISHED.search(data, max(0, len(data) - _MAX_UNFINISHED_BYTES))
            if not is_end and found is not None:
                self._unfinished = found[0]
                data = data[: found.start()]
            if data or is_end:
                return self._repaired(data)

    def _begin(self, data: bytes) -> None:
        """Finds the encoding from a file's first bytes."""
        self._has_begun = True
        self._is_wide = is_wide(data)
        declared = _ENCODING.search(data[:200])
        if declared is None or declared[1].lower() in (b"utf-8", b"utf8"):
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _repaired(self, data: bytes) -> bytes:
        """Returns the next bytes, in which nothing is cut."""
        parts = []
        for part in _CDATA_BOUNDS.split(data):
            if part == _CDATA_BEGIN:
                self._is_in_cdata = True
            elif part == _CDATA_END and not self._is_in_cdata:
                part = b"]]&gt;"
            elif part == _CDATA_END:
                self._is_in_cdata = False
            elif self._is_in_cdata:
                # A reference is text there, so the replacement character stands outside.
                outside = _CDATA_END + _REPLACEMENT + _CDATA_BEGIN
                part = _NO_CHARACTER.sub(outside, part)
            else:
                part = _DAMAGE.sub(_repaired_reference, part)
                # In other encodings, these bytes may be those of letters.
                if self._decoder is not None:
                    part = _MARKUP.sub(_as_text, part)
            parts.append(part)
        return b"".join(parts)


def is_wide(head: bytes) -> bool:
    """Returns whether a file of XML that begins so is in UTF-16 or UTF-32."""
    return head.startswith(_WIDE)


def _as_text(match: re.Match[bytes]) -> bytes:
    """Returns a reference that XML has, or else what is written as references."""
    if match[0] == b"<":
        return b"&lt;"
    name = match[1]
    if name is None or name in _NAMED:
        return match[0] if name else b"&amp;"
    characters = html.entities.html5.get(f"{name.decode()};")
    if characters is None:
        return b"&amp;" + match[0][1:]
    return b"".join(b"&#%d;" % ord(character) for character in characters)


def _repaired_reference(match: re.Match[bytes]) -> bytes:
    """Returns a reference that XML allows, or the replacement character for anything else."""
    reference = match[1]
    if reference is None:
        return _REPLACEMENT
    code = int(reference[1:], 16) if reference.startswith(b"x") else int(reference)
    is_allowed = code in (0x9, 0xA, 0xD) or 0x20 <= code < 0xD800 or 0xE000 <= code < 0xFFFE
    return match[0] if is_allowed or 0x10000 <= code < 0x110000 else _REPLACEMENT
