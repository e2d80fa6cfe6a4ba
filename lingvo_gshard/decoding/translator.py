"""Translates lines of text: splits those that are too long for the model, and joins the parts."""

import logging
import re
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.decoding.text_decoder import Hypothesis, NBest, Part, TextDecoder
from lingvo_gshard.input import packing
from lingvo_gshard.input.normalization import normalize

# Marks after which long text may be cut, as the contents of a pattern's brackets.
SENTENCE_ENDS = ".!?;…。！？；।॥؟۔።"
CLOSING_MARKS = "\"'»”’)\\]"
PAUSES = ",:،、，："
DASHES = "-–—"

# Where to cut long text: after a sentence (and its quotes), at a comma or dash, between words. Some
# scripts have no spaces, so marks need none, but 3.500, 12:30 and example.com stay whole.
# decoding/text_graph.py has the same rules for TensorFlow.
_BREAKS = (
    re.compile(rf"[{SENTENCE_ENDS}]++[{CLOSING_MARKS}]*+(?![0-9A-Za-z])\s*"),
    re.compile(rf"[{PAUSES}](?![0-9A-Za-z])\s*|\s[{DASHES}]\s"),
    re.compile(r"\s+"),
)
# A cut leaves at least this share of the text on both sides: the `1.` of `1. Mai` is no sentence.
_MIN_SHARE = 1 / 8


_NOTHING = (Hypothesis("", 0.0, 0),)


class Translator(TextDecoder):
    """Translates lines. The translation of a blank line is empty, without a run of the model."""

    def parts(self, line: str, number: int = 1, seed: int = 0) -> list[Part]:
        """Returns the parts of a line, each with the token of its target; none of a blank line.

        A line that is too long for the model has several. `number` and `seed` are not used: the
        program has the seed of samples.
        """
        del number, seed
        beginning = self._beginning(line)
        longest = self.spec.input_lengths[-1]

        def fits(text: str) -> bool:
            return len(self._source.encode(beginning + text)) <= longest

        text = normalize(line.removeprefix(beginning))
        return [self._part(beginning, piece) for piece in split(text, fits) if piece]

    def _beginning(self, line: str) -> str:
        """Returns the token of the line's target and a space, or "" if it has none."""
        for target in self.spec.targets:
            beginning = self.spec.beginning(target)
            if line.startswith(beginning):
                return beginning
        return ""

    def _part(self, beginning: str, text: str) -> Part:
        ids = np.array(self._source.encode(beginning + text), np.int32)

        longest = self.spec.input_lengths[-1]
        if len(ids) > longest:  # Only a single character can be too long.
            logging.warning("Truncated %r from %d to %d pieces.", text, len(ids), longest)
            ids = packing.truncate(ids, longest)

        return Part(ids, self._row_length(len(ids)))

    def _text(self, source: np.ndarray, ids: np.ndarray) -> str:
        del source
        # Byte pieces can spell line breaks and tabs.
        return " ".join(self._target.decode(ids).split())

    def _joined_line(self, results: Sequence[NBest]) -> NBest:
        """Returns a line's translations: the i-th best of its parts form its own i-th best."""
        if not results:
            return _NOTHING
        if len(results) == 1:
            return results[0]
        # Some parts may have fewer hypotheses than others; the line has as many as each part has.
        return tuple(_concatenated(ranked) for ranked in zip(*results, strict=False))


def split(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Splits text into parts that fit, in order and without the space between them.

    What does not fit is cut in two near its middle: after a sentence if possible, else at a comma,
    between words, or within a word, down to single characters.
    """
    text = text.strip()
    if len(text) <= 1 or fits(text):
        return [text]
    middle = _middle(text)
    return split(text[:middle], fits) + split(text[middle:], fits)


def _middle(text: str) -> int:
    """Returns the best place to cut near the middle."""
    middle = len(text) // 2
    shortest = _MIN_SHARE * len(text)

    for pattern in _BREAKS:
        cuts = [match.end() for match in pattern.finditer(text)]
        cuts = [cut for cut in cuts if cut < len(text)]
        cuts = [cut for cut in cuts if min(cut, len(text) - cut) >= shortest]
        if cuts:
            return min(cuts, key=lambda cut: abs(cut - middle))

    return middle


def _concatenated(parts: Sequence[Hypothesis]) -> Hypothesis:
    num_tokens = sum(part.num_tokens for part in parts)
    score = sum(part.score * part.num_tokens for part in parts) / num_tokens
    return Hypothesis(" ".join(part.text for part in parts), score, num_tokens)
