"""The keys by which texts are compared, to find text of dev and test in training text.

A key leaves out details that often differ between copies of a text, but nothing that carries
meaning: two texts with the same key say the same.
"""

import re

from data_prep import characters, languages
from data_prep.tsv import Document, Example

# The punctuation left out of English keys. Other symbols carry meaning, such as %, #, * and +.
_PUNCTUATION = (
    "!\"'(),.:;?\\[\\]{}`\\-"
    "\xa1\xab\xb7\xbb\xbf\u2010-\u2027\u2039\u203a\u203d\u2045\u2046"
    "\u3001-\u3003\u3008-\u3011\u3014-\u301f\u30fb"
)
_SEPARATOR = re.compile(rf"[\s{_PUNCTUATION}]+")
# Punctuation that ends words, and is not an operator: `a ? b : c` and `cd ..` keep theirs.
_ENDS_OF_WORDS = re.compile(
    rf"(?<=[{characters.WORD}])[.,;:!?\u060c\u061b\u061f\u06d4\u0964\u0965\u3001\u3002]+(?=\s|\Z)"
)
# Next to these, punctuation may be part of a number or an operator.
_DIGIT_OR_OPERATOR = re.compile("[0-9<=>]")
# A spacing accent, in its NFKC form, which stands for an apostrophe.
_ACCENT = re.compile("[\u0300-\u036f](?<=\\s.)")
_OPERATORS = "<=>"
_BEFORE_OPERATORS = "!:-"  # != and := and ->
_AFTER_OPERATORS = "!-"  # =! and <-
_SIGNS = "-\u2010\u2011\u2012\u2013."  # A minus, or the point of .5
_CURRENCIES = "$\xa3\xa5\u20ac"


def of(normalized: Example, language: str) -> str:
    """Returns the key of an example's last side, given the name of its pair or corpus.

    The English side of a pair has the key of `english`. Documents, which may be in any language or
    in code, are compared without case and without the punctuation that ends words. Text in other
    languages is compared without case.
    """
    text = normalized.sides[-1]
    if isinstance(normalized, Document):
        return _ENDS_OF_WORDS.sub("", text.casefold())
    if languages.sides(language)[-1] == languages.ENGLISH:
        return english(text)
    return text.casefold()


def of_source(normalized: Example) -> str:
    """Returns the key of an example's first side."""
    return normalized.sides[0].casefold()


def english(normalized: str) -> str:
    """Returns English text without case, spaces and punctuation.

    Points, signs and spaces within and before numbers are kept, and so are operators: 3.5 is not
    35, -5 is not 5, and != is not =.
    """
    text = normalized.casefold()
    if not text.isascii():
        text = _ACCENT.sub("", text)

    if _DIGIT_OR_OPERATOR.search(text):
        key = _SEPARATOR.sub(_meaning_of, text)
    else:
        key = _SEPARATOR.sub("", text)
    return key or normalized  # A sentence of punctuation alone is compared unchanged.


def _meaning_of(separator: re.Match[str]) -> str:
    """Returns the punctuation and spaces, if any, that belong to a number or an operator."""
    text = separator[0]
    before = separator.string[separator.start() - 1] if separator.start() > 0 else " "
    after = separator.string[separator.end() :][:1]
    if before.isdecimal() and after.isdecimal():
        return "".join(text.split()) or " "

    kept = ""
    if before in _OPERATORS and text[0] in _AFTER_OPERATORS:
        kept = text[0]
        text = text[1:]
    if not text or not after:
        return kept

    # A hyphen or a point after a letter, or after another one, is not a sign.
    character_before = text[-2] if len(text) > 1 else before
    is_sign = text[-1] in _SIGNS and not character_before.isalnum()
    is_sign = is_sign and character_before not in _SIGNS
    is_before_number = after.isdecimal() or (after in _CURRENCIES and text[-1] != ".")
    is_before_operator = after in _OPERATORS and text[-1] in _BEFORE_OPERATORS
    if (is_sign and is_before_number) or is_before_operator:
        kept += "-" if text[-1] in _SIGNS[:-1] else text[-1]
    return kept
