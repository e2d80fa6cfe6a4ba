"""The directions of translation, and the tokens that tell a model its target language.

By default all languages are translated into English, as in the paper. If there are other targets,
each source begins with a token, a symbol of the source vocabulary: `<2de> a house`. A vocabulary
from elsewhere may have tokens of languages, with which both sides begin: see given_vocabulary.py.
"""

import dataclasses

from data_prep.given_vocabulary import GivenVocabulary
from data_prep.languages import ENGLISH
from data_prep.tsv import Example
from lingvo_gshard.input import example_codec

# For each setting, whether English is the source: of one direction, or of both.
SETTINGS = {
    "many_to_english": [False],
    "english_to_many": [True],
    "many_to_many": [False, True],
}


@dataclasses.dataclass(frozen=True)
class Direction:
    """From a language into English, or from English; sources begin with the token, if any.

    With `codes`, those of the source's and the target's language, each side's ids begin with the
    token of its language.
    """

    language: str
    from_english: bool
    token: str
    codes: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The code in the manifest: de if into English, en-de if from English; a corpus's name."""
        return f"{ENGLISH}-{self.language}" if self.from_english else self.language

    def turned(self, example: Example) -> tuple[str, ...]:
        """Returns the source, with its token, and the target of a pair; of a document its text."""
        return self._begun(example, self.token)

    def line(self, example: Example) -> tuple[str, ...]:
        """Returns the sides as `turned`, with the source as a line that is decoded.

        It begins with its languages, as the decoder's lines do.
        """
        return self._begun(example, " ".join(self.codes) or self.token)

    def _begun(self, example: Example, beginning: str) -> tuple[str, ...]:
        sides = example.sides
        if self.from_english:
            sides = sides[::-1]
        if beginning:
            source, *others = sides
            sides = (f"{beginning} {source}", *others)
        return sides


def of(language: str, setting: str, given: GivenVocabulary | None = None) -> list[Direction]:
    """Returns a language's directions, given one of SETTINGS and perhaps a vocabulary.

    Raises ValueError if the vocabulary has no token of the language, or of English.
    """
    if given is not None:
        codes = (given.code(language), given.code(ENGLISH))
        return [
            Direction(language, from_english, "", codes[::-1] if from_english else codes)
            for from_english in SETTINGS[setting]
        ]

    # A model whose only target is English needs no token to know it.
    needs_token = any(SETTINGS[setting])

    directions: list[Direction] = []
    for from_english in SETTINGS[setting]:
        target = language if from_english else ENGLISH
        token = example_codec.target_token(target) if needs_token else ""
        directions.append(Direction(language, from_english, token))
    return directions
