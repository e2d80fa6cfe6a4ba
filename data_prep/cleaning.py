"""Cleaning: all sides of an example are repaired and normalized, then it may be dropped.

The first rule that applies counts. Dev and test, which are for measuring, lose only malformed rows,
and examples with an empty side or a low score.
"""

import hashlib
import html
import html.entities
import re
from collections.abc import Sequence

import ftfy

from data_prep import languages, tsv
from data_prep.config import BuildConfig
from data_prep.rules import Rule
from data_prep.tsv import Example, Pair
from lingvo_gshard.input.normalization import Normalization

# Kana, Han and Hangul. One of these characters means about as much as three letters of an alphabet.
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_WESTERN = ("latin-1", "windows-1252")
# Short sentences may differ by any factor, so both lengths are increased by this much.
_RATIO_SLACK_CHARS = 10
# The same character ten times in a row, or more, with or without spaces.
_RUN = re.compile(r"(\S)(?: ?\1){9,}")
_MAX_RUNS_SHARE = 0.1  # The most of a document's characters. A ruler between parts is allowed.
# The first two bytes of a UTF-8 sequence, decoded as Latin-1 or Windows-1252.
_LEAD_BYTES = bytes(range(0xC2, 0xF5)).decode("latin-1")
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
# Windows-1252 leaves a few of these bytes undefined.
_NEXT_BYTES = "".join(_CONTINUATION_BYTES.decode(encoding, "ignore") for encoding in _WESTERN)
_DAMAGE = re.compile(f"[{_LEAD_BYTES}][{re.escape(_NEXT_BYTES)}]")
_ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")
# Where a tokenizer has split a word at a hyphen, or a number at its point.
_TOKENIZER_MARK = re.compile(r"(?<=\S) @([-,.])@ (?=\S)")
_BREAK = re.compile(r"[\t\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
ENGLISH_SCRIPTS = frozenset({"Latn"})


def repair(text: str, own_scripts: frozenset[str]) -> str:
    """Repairs UTF-8 that was clearly decoded as a western encoding ("schÃ¶n").

    Some orthographies have marks that look like damage. So a repair is skipped if it would add
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


def repair_sides(example: Example, scripts: Sequence[frozenset[str]]) -> Example:
    """Returns an example with all sides repaired, given each side's own scripts."""
    return tsv.with_sides(example, map(repair, example.sides, scripts))


def is_escaped(example: Example) -> bool:
    """Returns whether a side has an HTML entity, or a tokenizer's mark, such as @-@."""
    for side in example.sides:
        if _TOKENIZER_MARK.search(side):
            return True
        if any(_text_of(entity) != entity for entity in _ENTITY.findall(side)):
            return True
    return False


def unescape_sides(example: Example) -> Example:
    """Returns an example without the escapes of `is_escaped`: it's instead of it &apos;s.

    White space is kept, except next to a tokenizer's mark.
    """
    return tsv.with_sides(example, map(_unescape, example.sides))


def _unescape(text: str) -> str:
    # Text that was escaped twice, such as `&amp;quot;`, needs two rounds.
    escaped = ""
    while escaped != text:
        escaped = text
        text = _ENTITY.sub(lambda entity: _text_of(entity[0]), escaped)
    # An entity for a line break or a tab must not start another line or side.
    text = _BREAK.sub(" ", text)
    return _TOKENIZER_MARK.sub(r"\1", text)


def _text_of(entity: str) -> str:
    """Returns the text of an entity; an unknown entity is returned unchanged."""
    name = entity.removeprefix("&")
    if name.startswith("#"):
        return html.unescape(entity)
    return html.entities.html5.get(name, entity)


def normalize_sides(example: Example, normalization: Normalization = Normalization.NFKC) -> Example:
    """Returns an example with all sides normalized: see normalization.py."""
    return tsv.with_sides(example, map(normalization.of, example.sides))


def digest(text: str) -> int:
    """Returns a 64-bit hash, for comparing millions of texts."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())


def broken_rule(
    example: Example, pair: str, own_scripts: Sequence[frozenset[str]], config: BuildConfig
) -> Rule | None:
    """Returns the first rule that a normalized example breaks, of the rules for single examples.

    `pair` is the name of its languages or its corpus; `own_scripts` has each side's own scripts.
    """
    sides = example.sides
    if any("\ufffd" in side for side in sides):
        return Rule.UNDECODABLE
    if not all(sides):
        return Rule.EMPTY

    # Text that was not translated, or is not a sentence.
    if isinstance(example, Pair):
        rule = _broken_rule_of_pairs(example, config)
        if rule is not None:
            return rule
    elif _runs_share(example.text) > _MAX_RUNS_SHARE:
        return Rule.REPEATED

    # Text in another language. Scripts are cheap to count and catch most of it.
    for side, scripts in zip(sides, own_scripts, strict=False):
        if languages.is_mostly_foreign(side, scripts):
            return Rule.WRONG_SCRIPT
    if config.check_language:
        for side, expected in zip(sides, languages.sides(pair), strict=False):
            if languages.is_surely_another(side, expected):
                return Rule.WRONG_LANGUAGE
    return None


def _broken_rule_of_pairs(pair: Pair, config: BuildConfig) -> Rule | None:
    """Returns the first rule of length and repetition that a pair breaks."""
    # Lengths in letters of an alphabet.
    longer = max(_length(pair.source), _length(pair.english))
    shorter = min(_length(pair.source), _length(pair.english))
    if longer > config.max_chars:
        return Rule.TOO_LONG
    if (longer + _RATIO_SLACK_CHARS) / (shorter + _RATIO_SLACK_CHARS) > config.max_length_ratio:
        return Rule.RATIO

    if pair.source == pair.english:
        return Rule.IDENTICAL
    if _RUN.search(pair.source) or _RUN.search(pair.english):
        return Rule.REPEATED
    return None


def _runs_share(text: str) -> float:
    """Returns the share of a text that consists of one character many times in a row."""
    return sum(len(run[0]) for run in _RUN.finditer(text)) / len(text)


def _length(text: str) -> int:
    """Returns the length of a text in characters; a wide character counts as three."""
    return len(text) + 2 * len(_WIDE.findall(text))
