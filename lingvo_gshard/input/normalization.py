"""The form in which text is trained on, evaluated or translated, as its vocabulary wants it."""

import enum
import re
import unicodedata

# Most control, format and private use characters, but not the zero width joiners that scripts of
# India and Persia need, and not white space, which is collapsed.
CONTROL = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\ue000-\uf8ff]"
)


class Normalization(enum.StrEnum):
    """What is done to text before a vocabulary's SentencePiece model, which has rules of its own.

    NFKC: `normalize`, which the project's own vocabularies were trained with. MODEL: nothing.
    """

    NFKC = "nfkc"
    MODEL = "model"

    def of(self, text: str) -> str:
        """Returns the text as the model takes it."""
        return normalize(text) if self is Normalization.NFKC else text


def normalize(text: str) -> str:
    """Returns the text in NFKC, without control characters, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", CONTROL.sub("", text)).split())
