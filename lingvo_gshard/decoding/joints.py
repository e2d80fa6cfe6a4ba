"""The joints between the parts of a long text: a space, or nothing in scripts without spaces.

decoding/text_graph.py has the same rule for TensorFlow.
"""

import re
from collections.abc import Iterable, Sequence

# The scripts without spaces between words, and the punctuation of Chinese and Japanese, as the
# contents of a pattern's brackets.
WITHOUT_SPACES = (
    "\u0e00-\u0eff"  # Thai and Lao.
    "\u0f00-\u0fff"  # Tibetan.
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"  # Burmese and other languages in its script.
    "\u1780-\u17ff\u19e0-\u19ff"  # Khmer.
    "\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf"  # Tai Le, New Tai Lue, Tai Tham and Tai Viet.
    "\u1b00-\u1b7f\ua980-\ua9df"  # Balinese and Javanese.
    "\u2e80-\u2fdf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han.
    "\u3040-\u312f\u31a0-\u31ff\U0001b000-\U0001b16f"  # Kana and Bopomofo.
    "\u3000-\u303f\u3300-\u33ff\ufe30-\ufe4f\uff01-\uff9f"  # Their punctuation and forms.
)
_WITHOUT_SPACES = re.compile(f"[{WITHOUT_SPACES}]")


def joined(parts: Sequence[str]) -> str:
    """Returns the parts of a text as one text; empty parts leave no trace."""
    pieces: list[str] = []
    for part in filter(None, parts):
        if pieces:
            pieces.append(_joint(pieces[-1], part))
        pieces.append(part)
    return "".join(pieces)


def _joint(left: str, right: str) -> str:
    """Returns the joint between two parts, a space or nothing.

    The letters beside it decide: there is a space unless both are of scripts without spaces.
    """
    if left[-1].isdecimal() and right[0].isdecimal():
        return " "
    has_spaces = {_has_spaces(reversed(left)), _has_spaces(right)}
    return "" if False in has_spaces and True not in has_spaces else " "


def _has_spaces(text: Iterable[str]) -> bool | None:
    """Returns whether the script of a text's first letter has spaces; None without letters."""
    for character in text:
        if _WITHOUT_SPACES.match(character):
            return False
        if character.isalpha():
            return True
    return None
