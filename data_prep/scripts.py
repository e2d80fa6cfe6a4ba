"""Scripts (ISO 15924) that text is written in, and those that a language is.

What the registries call a language's usual script is often not that of the text at hand (ancient
Greek, Ojibwa, Samaritan Hebrew), so a language's scripts are those that its own text is mostly in,
unless its code names one (sr-Latn) or the configuration does.
"""

import collections
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from fontTools import unicodedata as script_data

from data_prep import languages

LATIN = "Latn"
# The scripts that the codes of mixed ones stand for.
_MIXED = {
    "Hans": ("Hani",),
    "Hant": ("Hani",),
    "Jpan": ("Hani", "Hira", "Kana"),
    "Kore": ("Hang", "Hani"),
}
# A script with this share of a language's letters is one of the language's own.
_MIN_OWN_SHARE = 0.1
_NO_SCRIPT = ("Zyyy", "Zinh", "Zzzz")  # Common, inherited, unknown.


def checked(codes: Any) -> tuple[str, ...]:
    """Returns a list of ISO 15924 codes as a tuple. Raises ValueError: it is none."""
    if not isinstance(codes, list):
        raise ValueError(f"scripts {codes!r}: expected a list, such as ['Cyrl', 'Latn']")
    for code in codes:
        if code not in _MIXED and not script_data.script_name(code, default=""):
            raise ValueError(f"script {code!r}: expected an ISO 15924 code, such as Cyrl")
    return tuple(codes)


@functools.cache
def of_char(char: str) -> str | None:
    """The script of a letter or mark, None of digits, punctuation and the like."""
    script = str(script_data.script(char))
    return None if script in _NO_SCRIPT else script


def count(text: str) -> collections.Counter[str]:
    """The characters of each script in a text."""
    found: collections.Counter[str] = collections.Counter()
    for char, number in collections.Counter(text).items():
        script = of_char(char)
        if script is not None:
            found[script] += number
    return found


def own_scripts(
    code: str, counts: Mapping[str, int], configured: Mapping[str, Iterable[str]]
) -> frozenset[str]:
    """The scripts of a language; none, for a language without a letter.

    Args:
        code: its code; a script in it decides.
        counts: characters of each script in a part of its text.
        configured: scripts by language code, which decide where there are any.
    """
    named = configured.get(code) or filter(None, [languages.script(code)])
    spread = frozenset(one for script in named for one in _MIXED.get(script, (script,)))
    if spread:
        return spread
    total = sum(counts.values())
    own = {script for script, number in counts.items() if number >= _MIN_OWN_SHARE * total}
    for group in _MIXED.values():
        # Where there is one kana there will be the other; Han alone tells nothing.
        if own & set(group) - {"Hani"}:
            own |= set(group)
    return frozenset(own)


def is_mostly_foreign(text: str, own: frozenset[str]) -> bool:
    """Whether more of a text's characters are of other scripts than of `own`.

    With `own` empty nothing is foreign.
    """
    if not own:
        return False
    familiar = _familiar(own)
    new = set(text) - familiar
    familiar.update(char for char in new if of_char(char) is None or of_char(char) in own)
    if new <= familiar:
        return False
    counts = count(text)
    num_own = sum(counts[script] for script in own)
    return counts.total() - num_own > num_own


@functools.cache
def _familiar(own: frozenset[str]) -> set[str]:
    """The characters met so far that are not foreign to `own`: most texts hold no others."""
    return set()
