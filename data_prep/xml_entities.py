"""The entities that an XML file declares in its own DTD, replaced by their text within limits."""

import re

REPLACEMENT = b"&#xFFFD;"  # Replaces text beyond the limits, and so marks it as undecodable.
NAME = rb"[A-Za-z_:\x80-\xff][\w:.\x80-\xff-]*"
_REFERENCE = re.compile(rb"&(%s);" % NAME)

# XML up to its first element: declarations, comments and white space around a DTD.
_COMMENT = rb"<!--(?:(?!-->).)*+-->|<\?(?:(?!\?>).)*+\?>"
_NO_ELEMENT = rb"(?:[^<]|%s)*+" % _COMMENT
_QUOTED = rb"\"[^\"]*+\"|'[^']*+'"
_DTD = (
    rb"<!DOCTYPE\b(?:%s|[^\"'\[>])*+"
    rb"(?:\[(?P<declarations>(?:%s|%s|(?!<!--|<\?)[^\]\"'])*+)\]\s*+)?+>"
) % (_QUOTED, _COMMENT, _QUOTED)
PROLOG = re.compile(
    rb"(?P<before>%s)(?P<dtd>%s)?+%s(?=<[^!?])" % (_NO_ELEMENT, _DTD, _NO_ELEMENT), re.DOTALL
)
MAX_PROLOG_BYTES = 1 << 20
# Entities with SYSTEM or PUBLIC are in other files, which are never read.
_DECLARATION = re.compile(rb"<!ENTITY\s+(%s)\s+(%s)\s*>" % (NAME, _QUOTED))

# The limits: an entity's text, the depth of its references, and the text of all references in a
# file, which grows with the number of bytes read.
_MAX_ENTITY_BYTES = 1 << 16
_MAX_DEPTH = 100
_MAX_EXPANDED_BYTES = 1 << 20
_MAX_GROWTH = 16


class Entities:
    """A DTD's entities. One that is too long, or refers to itself, is a replacement character.

    So a small file cannot expand to a text that exceeds memory.
    """

    def __init__(self, declarations: bytes = b"") -> None:
        """Reads the `declarations`, the part of a DTD in brackets, in UTF-8."""
        self._values: dict[bytes, bytes] = {}
        without_comments = re.sub(_COMMENT, b"", declarations, flags=re.DOTALL)
        for name, quoted in _DECLARATION.findall(without_comments):
            self._values.setdefault(name, _as_content(quoted[1:-1]))  # The first one counts.
        self._texts: dict[bytes, bytes] = {}
        self._allowed_bytes = _MAX_EXPANDED_BYTES

    def expanded(self, content: bytes) -> bytes:
        """Returns the next part of a file, in which no reference is cut, with entities expanded."""
        if not self._values:
            return content
        self._allowed_bytes += _MAX_GROWTH * len(content)
        return _REFERENCE.sub(self._allowed_text, content)

    def _allowed_text(self, reference: re.Match[bytes]) -> bytes:
        if reference[1] not in self._values:
            return reference[0]
        text = self._text(reference[1], 0)
        if len(text) > self._allowed_bytes:
            return REPLACEMENT
        self._allowed_bytes -= len(text)
        return text

    def _text(self, name: bytes, depth: int) -> bytes:
        """Returns the text of an entity, with its references to other entities expanded."""
        if depth > _MAX_DEPTH:
            return REPLACEMENT
        if name not in self._texts:
            self._texts[name] = REPLACEMENT  # For a reference to itself.
            self._texts[name] = self._flat(self._values[name], depth + 1)
        return self._texts[name]

    def _flat(self, value: bytes, depth: int) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        end = 0
        for reference in _REFERENCE.finditer(value):
            if reference[1] not in self._values:
                continue
            parts += [value[end : reference.start()], self._text(reference[1], depth)]
            num_bytes += len(parts[-2]) + len(parts[-1])
            end = reference.end()
            if num_bytes > _MAX_ENTITY_BYTES:
                return REPLACEMENT

        text = b"".join([*parts, value[end:]])
        return text if len(text) <= _MAX_ENTITY_BYTES else REPLACEMENT


def _as_content(value: bytes) -> bytes:
    """Returns an entity's value in a form for elements and, if it is text, for attributes."""
    if b"<" in value:  # The value has elements.
        return value
    for character, reference in ((b'"', b"&quot;"), (b"'", b"&apos;"), (b">", b"&gt;")):
        value = value.replace(character, reference)
    return value
