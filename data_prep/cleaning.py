"""Cleaning of parallel text: repair and normalize both sides, then drop a pair by the first rule.

    undecodable      a replacement character: the text was damaged before it came here
    empty            nothing is left of a side
    too_long         a side has too many characters
    ratio            one side is many times longer than the other
    identical        the source is the English
    repeated         one character over and over: a ruler, a filler, a stuck key
    wrong_script     a side is mostly in scripts that are not its language's
    wrong_language   a side is surely in another language (only with check_language)

Two more rules need the whole corpus, see selection.py:

    held_out         the English, or the source, is also in dev or test
    duplicate        the same pair occurs before in this language

Dev and test are normalized and dropped from only where a side is empty: what they measure is
given, not chosen.
"""

import dataclasses
import enum
import hashlib
import re
import unicodedata

import ftfy

from data_prep import identification, scripts
from data_prep.tsv import Pair

# Control and format characters and private use, but not the zero width joiners that scripts
# of India and Persia need, and no white space (that is collapsed).
_CONTROL = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ue000-\uf8ff]"
)
# Kana, Han and Hangul: a character carries about as much as three of an alphabet.
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_WIDE_WEIGHT = 3
_WESTERN = ("latin-1", "windows-1252")
# Two-word sentences may differ by any factor; this many characters are added to both sides.
_RATIO_SLACK_CHARS = 10
# Ten of a character in a row, with or without spaces between.
_RUN = re.compile(r"(\S)(?: ?\1){9}")
# The first two bytes of a UTF-8 sequence, read as Latin-1 or Windows-1252.
_LEAD_BYTES = bytes(range(0xC2, 0xF5)).decode("latin-1")
_NEXT_BYTES = "".join(bytes([b]).decode(e, "ignore") for b in range(0x80, 0xC0) for e in _WESTERN)
_DAMAGE = re.compile(f"[{_LEAD_BYTES}][{re.escape(_NEXT_BYTES)}]")
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")


class Rule(enum.StrEnum):
    """Why a pair is dropped; the counts of the manifest have these names."""

    MALFORMED = "malformed"
    UNDECODABLE = "undecodable"
    EMPTY = "empty"
    TOO_LONG = "too_long"
    RATIO = "ratio"
    IDENTICAL = "identical"
    REPEATED = "repeated"
    WRONG_SCRIPT = "wrong_script"
    WRONG_LANGUAGE = "wrong_language"
    HELD_OUT = "held_out"
    DUPLICATE = "duplicate"
    TOO_MANY_PIECES = "too_many_pieces"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Lengths in characters, a wide one (Han, kana, Hangul) counted as three."""

    max_chars: int = 1000
    max_length_ratio: float = 5.0
    check_language: bool = False


def repair(text: str, own_scripts: frozenset[str]) -> str:
    """Undoes UTF-8 that was read as a western encoding ("schÃ¶n"), where that is plain to see.

    A repair that brings letters of a script which is neither the text's nor its language's is none:
    some orthographies have marks that look like damage.
    """
    if not _DAMAGE.search(text):
        return text
    repaired = str(ftfy.fix_encoding(text))
    new_scripts = scripts.count(repaired).keys() - scripts.count(text).keys()
    return repaired if new_scripts <= own_scripts else text


def repair_pair(pair: Pair, own_scripts: frozenset[str]) -> Pair:
    """`repair` on both sides; `own_scripts` are the source's."""
    english = repair(pair.english, frozenset({scripts.LATIN}))
    return Pair(repair(pair.source, own_scripts), english)


def normalize(text: str) -> str:
    """NFKC, no control characters, single spaces."""
    if not unicodedata.is_normalized("NFKC", text):
        text = unicodedata.normalize("NFKC", text)
    return " ".join(_CONTROL.sub("", text).split())


def normalize_pair(pair: Pair) -> Pair:
    """`normalize` on both sides."""
    return Pair(normalize(pair.source), normalize(pair.english))


def english_key(normalized: str) -> str:
    """What two English sentences are compared by: letters and digits, without case."""
    return _NOT_ALPHANUMERIC.sub("", normalized.casefold()) or normalized


def source_key(normalized: str) -> str:
    """What two source sentences are compared by: the text without case."""
    return normalized.casefold()


def digest(text: str) -> int:
    """64 bits that stand for a text wherever texts are compared by the million."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())


def broken_rule(
    pair: Pair, language: str, own_scripts: frozenset[str], limits: Limits
) -> Rule | None:
    """The first rule that a normalized pair breaks, of those that need nothing but the pair.

    Args:
        pair: both sides normalized.
        language: the source's code.
        own_scripts: of the source, see scripts.py.
        limits: the numbers.
    """
    sides = (pair.source, pair.english)
    if any("\ufffd" in side for side in sides):
        return Rule.UNDECODABLE
    if not all(sides):
        return Rule.EMPTY
    lengths = [_length_chars(side) for side in sides]
    if max(lengths) > limits.max_chars:
        return Rule.TOO_LONG
    ratio = (max(lengths) + _RATIO_SLACK_CHARS) / (min(lengths) + _RATIO_SLACK_CHARS)
    if ratio > limits.max_length_ratio:
        return Rule.RATIO
    if pair.source == pair.english:
        return Rule.IDENTICAL
    if any(map(_RUN.search, sides)):
        return Rule.REPEATED
    if scripts.is_mostly_foreign(pair.source, own_scripts) or scripts.is_mostly_foreign(
        pair.english, frozenset({scripts.LATIN})
    ):
        return Rule.WRONG_SCRIPT
    if limits.check_language and identification.is_surely_another(pair, language):
        return Rule.WRONG_LANGUAGE
    return None


def _length_chars(text: str) -> int:
    if text.isascii():
        return len(text)
    return len(text) + (_WIDE_WEIGHT - 1) * len(_WIDE.findall(text))
