"""Cleaning of parallel text: both sides are repaired and normalized, then a pair may be dropped.

The first rule that applies counts. Dev and test, which measure, lose only malformed rows, and pairs
with an empty side or a low score.
"""

import collections
import enum
import hashlib
import re

import ftfy

from data_prep import languages
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from lingvo_gshard.input.normalization import normalize

# Kana, Han and Hangul. A character of these carries about as much as three of an alphabet.
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_WESTERN = ("latin-1", "windows-1252")
# Short sentences may differ by any factor, so both lengths are increased by this much.
_RATIO_SLACK_CHARS = 10
# The same character ten times in a row, with or without spaces.
_RUN = re.compile(r"(\S)(?: ?\1){9}")
# The first two bytes of a UTF-8 sequence, decoded as Latin-1 or Windows-1252.
_LEAD_BYTES = bytes(range(0xC2, 0xF5)).decode("latin-1")
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
# Windows-1252 leaves a few of these bytes undefined.
_NEXT_BYTES = "".join(_CONTINUATION_BYTES.decode(encoding, "ignore") for encoding in _WESTERN)
_DAMAGE = re.compile(f"[{_LEAD_BYTES}][{re.escape(_NEXT_BYTES)}]")
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
ENGLISH_SCRIPTS = frozenset({"Latn"})


class Rule(enum.StrEnum):
    """Why a pair is dropped; the manifest counts the pairs under these names."""

    MALFORMED = "malformed"  # The line holds no pair.
    LOW_SCORE = "low_score"  # The source gives the pair a score below the threshold.
    UNDECODABLE = "undecodable"  # A replacement character: the text was damaged before.
    EMPTY = "empty"  # Nothing is left of a side.
    TOO_LONG = "too_long"  # A side has too many characters.
    RATIO = "ratio"  # One side is many times longer than the other.
    IDENTICAL = "identical"  # The source equals the English.
    REPEATED = "repeated"  # One character is repeated many times, as in a ruler.
    WRONG_SCRIPT = "wrong_script"  # A side is mostly in scripts that are not its language's.
    WRONG_LANGUAGE = "wrong_language"  # A side is surely in another language, if that is checked.
    HELD_OUT = "held_out"  # The English, or the source, is also in dev or test.
    DUPLICATE = "duplicate"  # The same pair occurs earlier in this language.
    TOO_MANY_PIECES = "too_many_pieces"  # A side has too many pieces of its vocabulary.


Dropped = collections.Counter[tuple[str, Rule]]  # Numbers of pairs by language and rule.


def repair(text: str, own_scripts: frozenset[str]) -> str:
    """Repairs UTF-8 that was clearly decoded as a western encoding ("schÃ¶n").

    Some orthographies have marks that look like damage. So a repair is not made if it would add
    letters of a script that is neither the text's nor its language's.
    """
    if not _DAMAGE.search(text):
        return text
    repaired = str(ftfy.fix_encoding(text))
    scripts_before = languages.count_scripts(text).keys()
    scripts_after = languages.count_scripts(repaired).keys()
    if scripts_after - scripts_before <= own_scripts:
        return repaired
    return text


def normalize_pair(pair: Pair) -> Pair:
    """Returns a pair with both sides normalized: see normalization.py."""
    return Pair(normalize(pair.source), normalize(pair.english))


def english_key(normalized: str) -> str:
    """Returns what English sentences are compared by: their letters and digits, without case."""
    key = _NOT_ALPHANUMERIC.sub("", normalized.casefold())
    return key or normalized  # A sentence of punctuation alone is compared as it is.


def digest(text: str) -> int:
    """Returns a 64-bit hash, by which millions of texts are compared."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())


def broken_rule(
    pair: Pair, language: str, own_scripts: frozenset[str], config: BuildConfig
) -> Rule | None:
    """Returns the first rule that a normalized pair breaks, among those that need only the pair.

    `language` and `own_scripts` are the source's.
    """
    source = pair.source
    english = pair.english
    if "\ufffd" in source or "\ufffd" in english:
        return Rule.UNDECODABLE
    if not source or not english:
        return Rule.EMPTY

    # Lengths in characters of an alphabet.
    longer = max(_length(source), _length(english))
    shorter = min(_length(source), _length(english))
    if longer > config.max_chars:
        return Rule.TOO_LONG
    if (longer + _RATIO_SLACK_CHARS) / (shorter + _RATIO_SLACK_CHARS) > config.max_length_ratio:
        return Rule.RATIO

    # Text that was not translated, or is no sentence.
    if source == english:
        return Rule.IDENTICAL
    if _RUN.search(source) or _RUN.search(english):
        return Rule.REPEATED

    # Text of another language. The scripts are cheap to count and catch most of it.
    if languages.is_mostly_foreign(source, own_scripts):
        return Rule.WRONG_SCRIPT
    if languages.is_mostly_foreign(english, ENGLISH_SCRIPTS):
        return Rule.WRONG_SCRIPT
    if config.check_language:
        if languages.is_surely_another(source, language):
            return Rule.WRONG_LANGUAGE
        if languages.is_surely_another(english, languages.ENGLISH):
            return Rule.WRONG_LANGUAGE
    return None


def _length(text: str) -> int:
    """Returns the length of a text in characters, where a wide one counts as three."""
    return len(text) + 2 * len(_WIDE.findall(text))
