"""The Unicode forms of text for training, evaluation and translation.

Our models read NFKC, so that they need not learn several ways to write the same text. They write
NFC, which looks and means the same as the text that they learned from: NFKC would turn `x²` into
`x2`, `，` into a comma, and a Thai vowel into two characters. Imported vocabularies have their own
forms.
"""

import enum
import re
import unicodedata
from typing import Literal

# Most control, format and private use characters, except the zero width joiners, which scripts of
# India and Persia need, and white space, which is collapsed.
CONTROL = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ue000-\uf8ff]"
)
# SentencePiece's mark for a space, which it reads and writes as one.
SPACE = "\u2581"


class Normalization(enum.StrEnum):
    """The normalization of text before a vocabulary's SentencePiece model, which has its own rules.

    NFKC: `normalize`, for text that models read. NFC: `normalize_written`, for text that they
    write. MODEL: no normalization.
    """

    NFKC = "nfkc"
    NFC = "nfc"
    MODEL = "model"

    def of(self, text: str) -> str:
        """Returns the normalized text for the model."""
        if self is Normalization.MODEL:
            return text
        return normalize(text) if self is Normalization.NFKC else normalize_written(text)


def normalize(text: str) -> str:
    """Returns the text in NFKC, without control characters, with single spaces."""
    return _in_form("NFKC", text)


def normalize_written(text: str) -> str:
    """Returns the text in NFC, without control characters, with single spaces."""
    return _in_form("NFC", text)


def one_line(text: str) -> str:
    """Returns text from a model as one line: without control characters, with single spaces.

    Byte pieces can spell any character, including line breaks and tabs.
    """
    return " ".join(without_control(text).split())


def without_control(text: str) -> str:
    """Returns the text without the characters of CONTROL."""
    return CONTROL.sub("", text)


def _in_form(form: Literal["NFC", "NFKC"], text: str) -> str:
    with_spaces = without_control(text).replace(SPACE, " ")
    return " ".join(unicodedata.normalize(form, with_spaces).split())
