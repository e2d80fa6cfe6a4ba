"""Sounds: a family's proto-words, and the regular changes that make a daughter's of them.

A sound is one character; capitals are S sh, C ch, N ng, X kh, Z zh. "A" is a vowel that takes the
colour of the word before it: a after a, o, u and e after e, i.
"""

import dataclasses
import random
import re

VOWELS = "aeiou"
_HARMONY = {"a": "a", "o": "a", "u": "a", "e": "e", "i": "e"}


@dataclasses.dataclass(frozen=True)
class Phonotactics:
    """What a family's proto-words are built of: `onsets` and `codas` may repeat to be frequent.

    `num_syllables` are the choices for content words.
    """

    onsets: tuple[str, ...]
    vowels: str
    codas: tuple[str, ...]
    num_syllables: tuple[int, ...]

    def word(self, rng: random.Random) -> str:
        """Draws a proto-word."""
        return "".join(
            rng.choice(self.onsets) + rng.choice(self.vowels) + rng.choice(self.codas)
            for _ in range(rng.choice(self.num_syllables))
        )


@dataclasses.dataclass(frozen=True)
class SoundChanges:
    """Regular changes in their order: (pattern, replacement), as in re.sub."""

    rules: tuple[tuple[str, str], ...]

    def apply(self, word: str) -> str:
        """Returns what a proto-word or proto-affix has become."""
        for pattern, replacement in self.rules:
            word = re.sub(pattern, replacement, word)
        return word


def harmonize(word: str) -> str:
    """Gives every "A" its colour, from left to right."""
    colour = "a"
    sounds = []
    for sound in word:
        if sound == "A":
            sound = colour
        colour = _HARMONY.get(sound, colour)
        sounds.append(sound)
    return "".join(sounds)
