"""The directions of translation, and the tokens that tell a model its target language.

By default all languages are translated into English, as in the paper. If there are other targets,
each source begins with a token, a symbol of the source vocabulary: `<2de> a house`.
"""

import dataclasses

from data_prep.languages import ENGLISH
from data_prep.tsv import Example
from lingvo_gshard.input import example_codec
from lingvo_gshard.input.normalization import normalize, normalize_written

# For each setting, whether English is the source: of one direction, or of both.
SETTINGS = {
    "many_to_english": [False],
    "english_to_many": [True],
    "many_to_many": [False, True],
}


@dataclasses.dataclass(frozen=True)
class Direction:
    """From a language into English, or from English; sources begin with the token, if any."""

    language: str
    from_english: bool
    token: str

    @property
    def code(self) -> str:
        """The code in the manifest: de if into English, en-de if from English; a corpus's name."""
        return f"{ENGLISH}-{self.language}" if self.from_english else self.language

    def turned(self, example: Example) -> tuple[str, ...]:
        """Returns the source, with its token, and the target of a pair; of a document its text."""
        return self._with_token(self._in_order(example))

    def trained(self, example: Example) -> tuple[str, ...]:
        """Returns what `turned` does in the forms that a model reads and writes."""
        *sources, target = self._in_order(example)
        return self._with_token((*map(normalize, sources), normalize_written(target)))

    def _in_order(self, example: Example) -> tuple[str, ...]:
        """Returns the source, if there is one, and the target."""
        return example.sides[::-1] if self.from_english else example.sides

    def _with_token(self, sides: tuple[str, ...]) -> tuple[str, ...]:
        if not self.token:
            return sides
        source, *others = sides
        return (f"{self.token} {source}", *others)


def of(language: str, setting: str) -> list[Direction]:
    """Returns a language's directions, given one of SETTINGS."""
    # A model whose only target is English needs no token to know it.
    needs_token = any(SETTINGS[setting])

    directions: list[Direction] = []
    for from_english in SETTINGS[setting]:
        target = language if from_english else ENGLISH
        token = example_codec.target_token(target) if needs_token else ""
        directions.append(Direction(language, from_english, token))
    return directions
