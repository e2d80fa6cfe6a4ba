"""The directions of translation, and the tokens that tell a model its target language.

By default all languages are translated into English, as in the paper. If there are other targets,
each source begins with a token, a symbol of the source vocabulary: `<2de> a house`.
"""

import dataclasses

from data_prep.languages import ENGLISH
from data_prep.tsv import Pair
from lingvo_gshard.input import example_codec

# For each setting, whether English is the source.
SETTINGS = dict(many_to_english=[False], english_to_many=[True], many_to_many=[False, True])


@dataclasses.dataclass(frozen=True)
class Direction:
    """From a language into English, or from English; sources begin with the token, if any."""

    language: str
    from_english: bool
    token: str

    @property
    def code(self) -> str:
        """What the manifest lists it as: de if into English, en-de if from English."""
        return f"{ENGLISH}-{self.language}" if self.from_english else self.language

    def turned(self, pair: Pair) -> tuple[str, str]:
        """Returns the source, with its token, and the target of a pair."""
        sides = (pair.english, pair.source) if self.from_english else (pair.source, pair.english)
        return f"{self.token} {sides[0]}" if self.token else sides[0], sides[1]


def of(language: str, setting: str) -> list[Direction]:
    """Returns a language's directions, given one of SETTINGS."""
    kinds = SETTINGS[setting]
    targets = [language if from_english else ENGLISH for from_english in kinds]
    tokens = [example_codec.target_token(target) if any(kinds) else "" for target in targets]
    return [Direction(language, *each) for each in zip(kinds, tokens, strict=True)]
