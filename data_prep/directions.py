"""The directions of translation, and the tokens that name a model's target language.

By default all languages are translated into English, as in the paper. If there are other targets,
each source begins with a token, a symbol of the source vocabulary: `<2de> a house`. A given
vocabulary may have tokens of languages, with which both sides begin: see given_vocabulary.py.
Pairs without English are translated in both directions.
"""

import dataclasses

from data_prep import languages
from data_prep.given_vocabulary import GivenVocabulary
from data_prep.languages import ENGLISH
from data_prep.sources import Source
from data_prep.tsv import Example
from lingvo_gshard.input import example_codec

# For each setting and direction, whether the sides of a pair are swapped. In a pair, English is the
# second side.
SETTINGS = {
    "many_to_english": [False],
    "english_to_many": [True],
    "many_to_many": [False, True],
}
_BOTH = "many_to_many"


@dataclasses.dataclass(frozen=True)
class Direction:
    """A direction from a pair's first language into its last one, or the other way round.

    In records, a source begins with `token`, if any. If `codes` has the codes of the source's and
    the target's language, each side's ids begin with its language's token.
    """

    language: str  # The name of the pair (languages.py), or a document's corpus.
    is_reversed: bool = False
    token: str = ""
    codes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The language to translate from."""
        return languages.sides(self.language)[1 if self.is_reversed else 0]

    @property
    def target(self) -> str:
        """The language to translate into, which counts as English for documents."""
        return languages.sides(self.language)[0 if self.is_reversed else 1]

    @property
    def code(self) -> str:
        """The code in the manifest: de for de into English, else en-de or de-fr; or a corpus."""
        return self.source if self.target == ENGLISH else f"{self.source}-{self.target}"

    @property
    def beginning(self) -> str:
        """The beginning of the decoder's line: the token, such as `<2de>`, or both codes."""
        return " ".join(self.codes) or self.token

    def sides(self, example: Example) -> tuple[str, ...]:
        """Returns the source and the target of a pair, or the text of a document."""
        return example.sides[::-1] if self.is_reversed else example.sides

    def record_sides(self, example: Example) -> tuple[str, ...]:
        """Returns the sides with the token, if any, at the beginning of the source."""
        sides = self.sides(example)
        if not self.token:
            return sides
        source, *others = sides
        return (f"{self.token} {source}", *others)


def check(source: Source, setting: str) -> None:
    """Raises ValueError if a source has pairs without English, but `setting` has one direction."""
    if source.is_without_english and setting != _BOTH:
        raise ValueError(
            f'{source}: pairs without English need directions = "{_BOTH}", got "{setting}"'
        )


def of(pair: str, setting: str, given: GivenVocabulary | None = None) -> list[Direction]:
    """Returns a pair's directions for one of SETTINGS and, perhaps, a given vocabulary.

    `pair` is its name, or a corpus's. Raises ValueError if the vocabulary lacks a token for one of
    its languages.
    """
    # If English is the only target, the model does not need a token.
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
