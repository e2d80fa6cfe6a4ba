"""Languages: their BCP-47 codes, the scripts of their text, and how to recognize both.

A language's registered script is often not the one that a corpus uses (ancient Greek, Ojibwa,
Samaritan Hebrew), so its own scripts are the scripts of most of its text; see `own_scripts`. A
language is named by its standard code, whatever a source calls it: `eng_Latn` is en. With
language_codes = "source", it keeps the source's name.

A pair of languages has one name: the other language's if one is English, or else a form such as
de+fr, which is never a language's name.
"""

import collections
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import langcodes
from fontTools import unicodedata as script_data
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from data_prep import characters

ENGLISH = "en"
_WITH = "+"
NAMES = ("standard", "source")  # The ways to name a source's languages: see `named`.
# The ISO 15924 codes that stand for several scripts.
_MIXED = {
    "Hans": ("Hani",),
    "Hant": ("Hani",),
    "Jpan": ("Hani", "Hira", "Kana"),
    "Kore": ("Hang", "Hani"),
}
# A script with at least this share of a language's letters is one of the language's own.
_MIN_OWN_SHARE = 0.1
_NO_SCRIPT = ("Zyyy", "Zinh", "Zzzz")  # Common, inherited, unknown.
# Shorter sentences, and less certain decisions, are not evidence of another language.
_MIN_IDENTIFIED_CHARS = 20
_MIN_IDENTIFIED_PROBABILITY = 0.95
_NO_LANGUAGE = "und"
# BCP-47's codes for text that is not in one known language.
_NOT_ONE_LANGUAGE = (None, _NO_LANGUAGE, "mis", "mul", "zxx")
_MAX_PRINTED_CHARS = 40
# The break before a Glottocode, as in cat_Latn_vale1252; the code becomes a tag's private part.
_GLOTTOCODE = re.compile(r"_(?=[a-z]{4}\d{4}$)")


@functools.cache
def is_valid(tag: str) -> bool:
    """Returns whether a tag is well-formed and all its parts are registered."""
    if tag.lower().startswith("x-"):  # A private tag does not name a language.
        return False
    tag = _GLOTTOCODE.sub("-x-", tag)
    if not langcodes.tag_is_valid(tag):
        return False
    return langcodes.Language.get(tag).language not in _NOT_ONE_LANGUAGE


@functools.cache
def code(tag: str) -> str:
    """Returns a tag in canonical form: de, zh-Hant, pt-BR. Raises ValueError if it is not valid."""
    if not is_valid(tag):
        raise ValueError(f"{tag!r} is not a language: expected a BCP-47 code like de or zh-Hant")
    return langcodes.standardize_tag(_GLOTTOCODE.sub("-x-", tag))


def is_name(tag: str, codes: str) -> bool:
    """Returns whether a source may give a language this name: see `named`."""
    if codes == "standard":
        return is_valid(tag)
    return re.fullmatch(f"[{characters.NAME}]+", tag) is not None


def printable(tag: str) -> str:
    """Returns an invalid language name in a form for tables and messages."""
    return re.sub(f"[^{characters.NAME}]", "?", tag)[:_MAX_PRINTED_CHARS] or _NO_LANGUAGE


def named(tag: str, codes: str) -> str:
    """Returns a language's standard code or, if `codes` is "source", the source's name for it.

    Raises ValueError if the tag is not valid, or if the source's name has characters other than
    letters, digits, - and _.
    """
    if codes == "standard":
        return code(tag)
    if not is_name(tag, codes):
        raise ValueError(f"{tag!r} is not a language: expected letters, digits, - and _")
    return tag


def is_english(tag: str) -> bool:
    """Returns whether a tag means English, as do en-GB and eng_Latn."""
    return is_valid(tag) and primary(tag) == ENGLISH


@functools.cache
def primary(tag: str) -> str:
    """Returns a tag's language without script and region: pt for pt-BR.

    Raises ValueError if the tag is not valid.
    """
    return str(langcodes.Language.get(code(tag)).language)


def paired(source: str, other: str) -> str:
    """Returns the name of a pair of languages in this order: de with English, or de+fr.

    Raises ValueError if both are the same language.
    """
    if is_english(other):
        return source
    if source == other:
        raise ValueError(f"both sides are in {source}")
    return f"{source}{_WITH}{other}"


def sides(pair: str) -> tuple[str, str]:
    """Returns the languages of a pair's two texts; for a document, its corpus and en."""
    source, _, other = pair.partition(_WITH)
    return source, other or ENGLISH


def is_without_english(pair: str) -> bool:
    """Returns whether neither language of a pair is English."""
    return _WITH in in_order(pair)


@functools.cache
def in_order(pair: str) -> str:
    """Returns a pair's name with English last, or else with its languages in alphabetical order.

    So a pair has one name, whichever side comes first in a source.
    """
    source, other = sides(pair)
    if is_english(other):
        return source
    if is_english(source):
        return other
    return paired(*sorted((source, other)))


def checked_scripts(codes: Any) -> tuple[str, ...]:
    """Returns a list of ISO 15924 codes as a tuple. Raises ValueError if it is not such a list."""
    if not isinstance(codes, list):
        raise ValueError(f"scripts {codes!r}: expected a list, such as ['Cyrl', 'Latn']")
    for script in codes:
        if script not in _MIXED and not script_data.script_name(script, default=""):
            raise ValueError(f"script {script!r}: expected an ISO 15924 code, such as Cyrl")
    return tuple(codes)


@functools.cache
def script_of(char: str) -> str | None:
    """Returns the script of a letter or mark; None for digits, punctuation and the like."""
    script = str(script_data.script(char))
    return None if script in _NO_SCRIPT else script


def count_scripts(text: str) -> collections.Counter[str]:
    """Counts the characters of each script in a text."""
    return collections.Counter(filter(None, map(script_of, text)))


def own_scripts(
    language: str, counts: Mapping[str, int], configured: Mapping[str, Iterable[str]]
) -> frozenset[str]:
    """Returns the scripts of a language; the set is empty if its text has no letters.

    The `configured` scripts come first, then a script in the code, then the `counts` of characters.
    """
    if configured.get(language):
        return _single_scripts(configured[language])

    in_code = langcodes.Language.get(code(language)).script if is_valid(language) else None
    if in_code:
        return _single_scripts([in_code])

    # The scripts of most of the text: names and quotations may be in others.
    total = sum(counts.values())
    own = {script for script, number in counts.items() if number >= _MIN_OWN_SHARE * total}
    for group in _MIXED.values():
        # Text with one kana will have the other, too, but Han alone may be Chinese.
        if own & set(group) - {"Hani"}:
            own |= set(group)
    return frozenset(own)


def _single_scripts(codes: Iterable[str]) -> frozenset[str]:
    """Returns the single scripts of ISO 15924 codes: one for each, except for the mixed codes."""
    single: set[str] = set()
    for script in codes:
        single.update(_MIXED.get(script, (script,)))
    return frozenset(single)


def is_mostly_foreign(text: str, own: frozenset[str]) -> bool:
    """Returns whether most letters of a text are outside its `own` scripts, if these are known."""
    if not own:
        return False
    counts = count_scripts(text)
    num_own = sum(counts[script] for script in own)
    return counts.total() > 2 * num_own


def is_surely_another(text: str, language: str) -> bool:
    """Returns whether py3langid, if it knows `language`, is sure that a text is in another one."""
    is_known = is_valid(language) and primary(language) in _identifier().labels
    if len(text) < _MIN_IDENTIFIED_CHARS or not is_known:
        return False
    identified, probability = _identifier().classify(text)
    return identified != primary(language) and probability >= _MIN_IDENTIFIED_PROBABILITY


@functools.cache
def _identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
