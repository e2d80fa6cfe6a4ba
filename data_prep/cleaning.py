"""Cleaning of parallel text: normalize both sides, then drop a training pair by the first rule.

    undecodable   a replacement character: the text was damaged before it came here
    empty         nothing is left of a side
    too_long      a side has too many characters
    ratio         one side is many times longer than the other
    held_out      the English, or the source, is also in dev or test
    duplicate     the same pair occurred before in this language

Dev and test are normalized and never dropped from: what they measure is given, not chosen.
"""

import collections
import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import Iterable

from data_prep import tsv

# Control and format characters and private use, but not the zero width joiners that scripts
# of India and Persia need, and no white space (that is collapsed).
_CONTROL = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ue000-\uf8ff]"
)
# Kana, Han and Hangul: a character carries about as much as three of an alphabet.
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_WIDE_WEIGHT = 3
# Two-word sentences may differ by any factor; this many characters are added to both sides.
_RATIO_SLACK_CHARS = 10


@dataclasses.dataclass(frozen=True)
class Limits:
    """Lengths in characters, a wide one (Han, kana, Hangul) counted as three."""

    max_chars: int = 1000
    max_length_ratio: float = 5.0


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What training text must not contain: keys of all English of dev and test, and of the
    sources of one language."""

    english: frozenset[str]
    sources: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Cleaned:
    """The pairs that are left, and the number dropped by each rule that dropped any."""

    pairs: list[tsv.Pair]
    dropped: dict[str, int]


def normalize(text: str) -> str:
    """NFKC, no control characters, single spaces."""
    return " ".join(_CONTROL.sub("", unicodedata.normalize("NFKC", text)).split())


def normalize_pair(pair: tsv.Pair) -> tsv.Pair:
    """`normalize` on both sides."""
    return tsv.Pair(normalize(pair.source), normalize(pair.english))


def english_key(text: str) -> str:
    """What two English sentences are compared by: letters and digits, without case."""
    key = "".join(filter(str.isalnum, normalize(text).casefold()))
    return key or text


def source_key(text: str) -> str:
    """What two source sentences are compared by: the text without case."""
    return normalize(text).casefold()


def clean(pairs: Iterable[tsv.Pair], held_out: HeldOut, limits: Limits) -> Cleaned:
    """Cleans the training pairs of one language."""
    kept: list[tsv.Pair] = []
    dropped: collections.Counter[str] = collections.Counter()
    seen: set[bytes] = set()
    for raw in pairs:
        pair = normalize_pair(raw)
        rule = _broken_rule(pair, held_out, limits) or _note_duplicate(pair, seen)
        if rule:
            dropped[rule] += 1
        else:
            kept.append(pair)
    return Cleaned(kept, dict(sorted(dropped.items())))


def _broken_rule(pair: tsv.Pair, held_out: HeldOut, limits: Limits) -> str | None:
    if "\ufffd" in pair.source or "\ufffd" in pair.english:
        return "undecodable"
    if not pair.source or not pair.english:
        return "empty"
    lengths = [_length_chars(pair.source), _length_chars(pair.english)]
    if max(lengths) > limits.max_chars:
        return "too_long"
    ratio = (max(lengths) + _RATIO_SLACK_CHARS) / (min(lengths) + _RATIO_SLACK_CHARS)
    if ratio > limits.max_length_ratio:
        return "ratio"
    if english_key(pair.english) in held_out.english or source_key(pair.source) in held_out.sources:
        return "held_out"
    return None


def _note_duplicate(pair: tsv.Pair, seen: set[bytes]) -> str | None:
    # Digests, not texts: the set of a large corpus has to stay in memory.
    digest = hashlib.blake2b(f"{pair.source}\t{pair.english}".encode(), digest_size=12).digest()
    if digest in seen:
        return "duplicate"
    seen.add(digest)
    return None


def _length_chars(text: str) -> int:
    if text.isascii():
        return len(text)
    return len(text) + (_WIDE_WEIGHT - 1) * len(_WIDE.findall(text))
