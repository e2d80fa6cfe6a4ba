"""Makes XML with a few damaged characters, which would stop a parser, readable for it.

The parser gets UTF-8, whatever the file's encoding, and no DTD: the DTD's entities are replaced by
their text (xml_entities.py).
"""

import codecs
import html.entities
import json
import re
from typing import Protocol

from data_prep import xml_entities
from data_prep.xml_entities import REPLACEMENT

# Characters that XML does not allow, and references that may be to such characters.
_NO_CHARACTER = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")
_DAMAGE = re.compile(rb"&#(x[0-9a-fA-F]+|[0-9]+);|" + _NO_CHARACTER.pattern)
# XML's own names. HTML has many more, which a parser without its DTD does not know.
_NAMED = (b"amp", b"lt", b"gt", b"quot", b"apos")
# A reference, or an ampersand that does not begin one; and a `<` that does not begin an element.
_MARKUP = re.compile(
    rb"&(?!#(?:x[0-9a-fA-F]+|[0-9]+);)(?:(%s);)?|<(?![A-Za-z_:/!?\x80-\xff])" % xml_entities.NAME
)
# Between these, nothing is markup.
_CDATA_BEGIN = b"<![CDATA["
_CDATA_END = b"]]>"
_CDATA_BOUNDS = re.compile(rb"(<!\[CDATA\[|\]\]>)")
# The beginning of any of these patterns at the end of some bytes.
_UNFINISHED = re.compile(rb"(?:&#?[\w:.\x80-\xff-]*|<(?:!(?:\[[CDAT]{0,5})?)?|\]{1,2})\Z")
_MAX_UNFINISHED_BYTES = 1 << 10
_ENCODING = re.compile(rb"""(<\?xml[^>]*?)\sencoding\s*=\s*["']([\w.-]+)["']""")
_MAX_DECLARATION_BYTES = 200
# The beginnings of UTF-16 and UTF-32, with or without a byte order mark.
_WIDE = (b"\xff\xfe", b"\xfe\xff", b"\0", b"<\0")


class Readable(Protocol):
    """A file of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Returns up to `size` bytes."""
        ...


class UnknownEncodingError(ValueError):
    """An XML file names an encoding that is not known."""


class Repaired:
    """An XML file with replacement characters for everything that XML does not allow.

    These are bytes that are invalid in the file's encoding, and characters such as NUL, even as
    references. `&` and `<` outside of markup become text, and HTML's names such as `&nbsp;` become
    their characters.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._unfinished = b""  # The beginning of a possible reference or other markup.
        self._is_in_cdata = False
        self._decoder: codecs.IncrementalDecoder | None = None
        self._entities = xml_entities.Entities()

    def read(self, size: int = -1) -> bytes:
        """Returns about `size` bytes in UTF-8; b"" at the end.

        Raises UnknownEncodingError if the file names an unknown encoding.
        """
        while True:
            if self._decoder is None:
                data, is_end = self._beginning(size)
            else:
                data, is_end = self._decoded(size)
            data = self._unfinished + data
            self._unfinished = b""

            # A reference or markup may continue in the next bytes.
            found = _UNFINISHED.search(data, max(0, len(data) - _MAX_UNFINISHED_BYTES))
            if not is_end and found is not None:
                self._unfinished = found[0]
                data = data[: found.start()]
            if data or is_end:
                return self._repaired(data)

    def _decoded(self, size: int, before: bytes = b"") -> tuple[bytes, bool]:
        """Returns the next bytes, after some from before, in UTF-8, and whether the file ends."""
        assert self._decoder is not None
        data = self._file.read(size)
        is_end = not data or size < 0
        return self._decoder.decode(before + data, is_end).encode(), is_end

    def _beginning(self, size: int) -> tuple[bytes, bool]:
        """Reads up to the first element: finds encoding and entities, and omits the DTD."""
        head = b""
        while len(head) < _MAX_DECLARATION_BYTES:
            data = self._file.read(size)
            head += data
            if not data or size < 0:
                break
        self._decoder = _decoder(head)

        content, is_end = self._decoded(size, head)
        while not is_end and len(content) < xml_entities.MAX_PROLOG_BYTES:
            if xml_entities.PROLOG.match(content):
                break
            more, is_end = self._decoded(size)
            content += more

        # A parser would apply the declared encoding to the UTF-8 that it gets.
        content = _ENCODING.sub(rb"\1", content, count=1)
        prolog = xml_entities.PROLOG.match(content)
        if prolog is not None and prolog["dtd"] is not None:
            self._entities = xml_entities.Entities(prolog["declarations"] or b"")
            # Errors name lines, so the line breaks stay.
            breaks = b"\n" * prolog["dtd"].count(b"\n")
            content = prolog["before"] + breaks + content[prolog.end("dtd") :]
        return content, is_end

    def _repaired(self, data: bytes) -> bytes:
        """Returns the next bytes, in which no reference or markup is cut, repaired."""
        parts = []
        for part in _CDATA_BOUNDS.split(data):
            if part == _CDATA_BEGIN:
                self._is_in_cdata = True
            elif part == _CDATA_END and not self._is_in_cdata:
                part = b"]]&gt;"
            elif part == _CDATA_END:
                self._is_in_cdata = False
            elif self._is_in_cdata:
                # A reference would be text in here, so the replacement character goes outside.
                outside = _CDATA_END + REPLACEMENT + _CDATA_BEGIN
                part = _NO_CHARACTER.sub(outside, part)
            else:
                part = self._entities.expanded(part)
                part = _DAMAGE.sub(_repaired_reference, part)
                part = _MARKUP.sub(_as_text, part)
            parts.append(part)
        return b"".join(parts)


def _decoder(head: bytes) -> codecs.IncrementalDecoder:
    """Returns a decoder for XML with this beginning.

    Raises UnknownEncodingError if it names an encoding that is unknown, or is not one of text.
    """
    declared = _ENCODING.search(head[:_MAX_DECLARATION_BYTES])
    # In UTF-16, the declaration would not have been found.
    if declared is None or declared[2].lower().startswith(b"utf-16"):
        return codecs.getincrementaldecoder(json.detect_encoding(head))("replace")

    name = declared[2].decode()
    try:
        b" ".decode(name, "replace")
        return codecs.getincrementaldecoder(name)("replace")
    except (LookupError, UnicodeError) as error:
        raise UnknownEncodingError(f"{name} is not a known encoding of text") from error


def is_wide(head: bytes) -> bool:
    """Returns whether an XML file with this beginning is in UTF-16 or UTF-32."""
    return head.startswith(_WIDE)


def _as_text(match: re.Match[bytes]) -> bytes:
    """Returns a reference that XML knows unchanged; anything else is escaped."""
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
        return REPLACEMENT
    code = int(reference[1:], 16) if reference.startswith(b"x") else int(reference)
    is_allowed = code in (0x9, 0xA, 0xD) or 0x20 <= code < 0xD800 or 0xE000 <= code < 0xFFFE
    return match[0] if is_allowed or 0x10000 <= code < 0x110000 else REPLACEMENT
