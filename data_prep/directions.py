"""The directions of translation, and the tokens that tell a model its target language.

By default all languages are translated into English, as in the paper. If there are other targets,
each source begins with a token, a symbol of the source vocabulary: `<2de> a house`. A vocabulary
from elsewhere may have tokens of languages, with which both sides begin: see given_vocabulary.py.
Pairs without English are translated in both directions.
"""

import dataclasses

from data_prep import languages
from data_prep.given_vocabulary import GivenVocabulary
from data_prep.languages import ENGLISH
from data_prep.sources import Source
from data_prep.tsv import Example
from lingvo_gshard.input import example_codec

# For each setting, whether the sides of a pair change places: of one direction, or of both. English
# is the last one.
SETTINGS = {
    "many_to_english": [False],
    "english_to_many": [True],
    "many_to_many": [False, True],
}
_BOTH = "many_to_many"


@dataclasses.dataclass(frozen=True)
class Direction:
    """From a pair's first language into its last one, or the other way round.

    Sources begin with the token, if any. With `codes`, those of the source's and the target's
    language, each side's ids begin with the token of its language.
    """

    language: str  # The pair's name, see languages.py; of a document its corpus.
    is_reversed: bool = False
    token: str = ""
    codes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The language to translate from."""
        return languages.sides(self.language)[1 if self.is_reversed else 0]

    @property
    def target(self) -> str:
        """The language to translate into, which is English for documents."""
        return languages.sides(self.language)[0 if self.is_reversed else 1]

    @property
    def code(self) -> str:
        """The code in the manifest: de if into English, else en-de or de-fr; a corpus's name."""
        return self.source if self.target == ENGLISH else f"{self.source}-{self.target}"

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
        if self.is_reversed:
            sides = sides[::-1]
        if beginning:
            source, *others = sides
            sides = (f"{beginning} {source}", *others)
        return sides


def check(source: Source, setting: str) -> None:
    """Raises ValueError if a source has pairs without English, but one direction is wanted."""
    if source.is_without_english and setting != _BOTH:
        raise ValueError(
            f'{source}: pairs without English need directions = "{_BOTH}", got "{setting}"'
        )


def of(pair: str, setting: str, given: GivenVocabulary | None = None) -> list[Direction]:
    """Returns a pair's directions, given one of SETTINGS and perhaps a vocabulary.

    `pair` is its name, or a corpus's. Raises ValueError if the vocabulary has no token of one of
    its languages.
    """
    # A model whose only target is English needs no token to know it.
    needs_token = any(SETTINGS[setting]) and given is None

    directions: list[Direction] = []
    for is_reversed in SETTINGS[setting]:
        direction = Direction(pair, is_reversed)
        if needs_token:
            token = example_codec.target_token(direction.target)
            direction = dataclasses.replace(direction, token=token)
        if given is not None:
            codes = (given.code(direction.source), given.code(direction.target))
            direction = dataclasses.replace(direction, codes=codes)
        directions.append(direction)
    return directions
