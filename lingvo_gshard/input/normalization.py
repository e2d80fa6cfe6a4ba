"""The forms of text that is trained on, evaluated, translated or written.

What our models read is in NFKC, so that they need not learn each way to write the same. What they
write is in NFC, which looks and means the same as the text that they learned from: NFKC would make
`x2` of `x²`, a comma of `，`, and two characters of a Thai vowel. Vocabularies from elsewhere have
forms of their own.
"""

import enum
import re
import unicodedata
from typing import Literal

# Most control, format and private use characters, but not the zero width joiners that scripts of
# India and Persia need, and not white space, which is collapsed.
CONTROL = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ue000-\uf8ff]"
)
# SentencePiece's mark of a space, which it reads and writes as one.
SPACE = "\u2581"


class Normalization(enum.StrEnum):
    """What is done to text before a vocabulary's SentencePiece model, which has rules of its own.

    NFKC: `normalize`, for what is read. NFC: `normalize_written`, for what is written. MODEL:
    nothing.
    """

    NFKC = "nfkc"
    NFC = "nfc"
    MODEL = "model"

    def of(self, text: str) -> str:
        """Returns the text as the model takes it."""
        if self is Normalization.MODEL:
            return text
        return normalize(text) if self is Normalization.NFKC else normalize_written(text)


def normalize(text: str) -> str:
    """Returns the text in NFKC, without control characters, with single spaces."""
    return _in_form("NFKC", text)


def normalize_written(text: str) -> str:
    """Returns the text in NFC, without control characters, with single spaces."""
    return _in_form("NFC", text)


def _in_form(form: Literal["NFC", "NFKC"], text: str) -> str:
    without_control = CONTROL.sub("", text).replace(SPACE, " ")
    return " ".join(unicodedata.normalize(form, without_control).split())
