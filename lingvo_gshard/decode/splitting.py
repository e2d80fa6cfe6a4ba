"""Long text in parts that each fit: cut at the ends of sentences, else between words."""

from __future__ import annotations

import re
from collections.abc import Callable

# After each: full stops of many scripts with what closes a quotation, then any space.
_BREAKS = (
    re.compile(r"[.!?;…。！？；।॥؟۔።]+[\"'»”’)\]]*\s*"),
    re.compile(r"[,:،、，：]\s*|\s[-–—]\s"),
    re.compile(r"\s+"),
)


def split(text: str, fits: Callable[[str], bool]) -> list[str]:
    """The parts of `text`, in order and together all of it but the space between them.

    What does not fit is cut in two where a sentence ends, nearest to the middle; else at a comma,
    a space, or in the middle of a word. A single character is a part, whether it fits or not.
    """
    text = text.strip()
    if len(text) <= 1 or fits(text):
        return [text]
    at = _cut(text)
    return split(text[:at], fits) + split(text[at:], fits)


def _cut(text: str) -> int:
    middle = len(text) // 2
    for pattern in _BREAKS:
        ends = [match.end() for match in pattern.finditer(text) if match.end() < len(text)]
        # Parts of a few letters are no sentences: `1. Mai`.
        ends = [end for end in ends if min(end, len(text) - end) * 8 >= len(text)]
        if ends:
            return min(ends, key=lambda end: abs(end - middle))
    return middle
