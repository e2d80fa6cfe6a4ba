r"""Classes of characters, for the brackets of a regular expression.

Python's `\w` matches letters, digits and `_`. Words of many scripts have other characters, too:
vowel signs, points and tones, which Unicode counts as marks or modifiers, and zero width joiners.
"""

import itertools
import unicodedata

from fontTools import unicodedata as script_data

_IDEOGRAPHS = 0x20000  # Plane 2.
_SPECIAL_PURPOSE = 0xE0000  # Plane 14, with variation selectors.
_LAST_MARK = 0xE01EF
_JOINERS = "\u200c\u200d"
# Tone letters, and letters that look like a colon and an equals sign.
_MODIFIERS = "\u02e5-\u02eb\ua700-\ua716\ua789\ua78a"
# Scripts whose words are not separated by spaces.
_UNSPACED = frozenset(
    "Bali Bopo Hani Hira Java Kana Khmr Lana Laoo Mymr Nshu Tale Talu Tang Tavt Thai Tibt".split()
)


def _marks() -> str:
    """Returns the ranges of all marks: Unicode's categories Mn, Mc and Me."""
    ranges: list[list[int]] = []
    # Planes 2 to 13 have ideographs or nothing, and would take a fifth of a second.
    for code in itertools.chain(range(_IDEOGRAPHS), range(_SPECIAL_PURPOSE, _LAST_MARK + 1)):
        if not unicodedata.category(chr(code)).startswith("M"):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


MARKS = _marks() + _JOINERS + _MODIFIERS  # Characters that continue a word after its letters.
WORD = rf"\w{MARKS}"
NAME = f"{WORD}-"  # For names of languages and corpora, which become parts of file names.


def is_unspaced(letter: str) -> bool:
    """Returns whether a letter's script writes words without spaces between them."""
    # A letter that several scripts share, such as the kana's length mark, has an extension.
    return not _UNSPACED.isdisjoint(script_data.script_extension(letter))
