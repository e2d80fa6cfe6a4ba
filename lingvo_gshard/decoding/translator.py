"""Translates lines of text: splits those that are too long for the model, and joins the parts."""

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.text_decoder import Hypothesis, NBest, Part, TextDecoder, distinct
from lingvo_gshard.input import packing

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


@dataclasses.dataclass(frozen=True)
class _Languages:
    """Where the model finds the languages of a line: in one of three places, or in none."""

    text: str = ""  # Before the line's own, in which its target is a piece.
    source_ids: tuple[int, ...] = ()  # Before those of its text.
    first_id: int = -1  # Of its translation.


class Translator(TextDecoder):
    """Translates lines. The translation of a blank line is empty, without a run of the model.

    A line begins as DecoderSpec.beginning has it, if its languages have to be named.
    """

    def parts(self, line: str, number: int = 1, seed: int = 0) -> list[Part]:
        """Returns the parts of a line, each with the tokens of its languages; none of a blank line.

        A line that is too long for the model has several. `number` and `seed` are not used: the
        program has the seed of samples. Raises ValueError for a line that has to begin with its
        languages, and does not.
        """
        del number, seed
        languages, text = self._divided(line)
        longest = self.spec.input_lengths[-1]

        def fits(text: str) -> bool:
            return len(self._ids(languages, text)) <= longest

        pieces = split(self._source.normalize(text), fits)
        return [self._part(languages, piece) for piece in pieces if piece]

    def num_tokens(self, lines: Sequence[str]) -> list[int]:
        """Returns the number of input tokens of each line, with EOS; raises as `parts`."""
        counts: list[int] = []
        for line in lines:
            languages, text = self._divided(line)
            counts.append(len(self._ids(languages, self._source.normalize(text))))
        return counts

    def _divided(self, line: str) -> tuple[_Languages, str]:
        """Returns the languages that a line begins with, and its own text."""
        if self.spec.sources:
            source, _, rest = line.partition(" ")
            target, _, text = rest.partition(" ")
            self.spec.beginning(target, source)  # Raises ValueError for others.
            source_id = self._source.languages[source]
            target_id = self._target.languages[target]
            return _Languages(source_ids=(source_id,), first_id=target_id), text

        for target in self.spec.targets:
            beginning = self.spec.beginning(target)
            if line.startswith(beginning):
                return _Languages(beginning), line.removeprefix(beginning)
        return _Languages(), line

    def _ids(self, languages: _Languages, text: str) -> list[int]:
        """Returns the ids of a source in normal form, with EOS."""
        return [*languages.source_ids, *self._source.encode(languages.text + text)]

    def _part(self, languages: _Languages, text: str) -> Part:
        ids = np.array(self._ids(languages, text), np.int32)

        longest = self.spec.input_lengths[-1]
        if len(ids) > longest:  # Only a single character can be too long.
            logging.warning("Truncated %r from %d to %d pieces.", text, len(ids), longest)
            ids = packing.truncate(ids, longest)

        return Part(ids, self._row_length(len(ids)), first_id=languages.first_id)

    def _more_features(self, parts: Sequence[Part]) -> NestedMap:
        """Returns the first token of each row's translation, where languages force one."""
        if not self.spec.sources:
            return NestedMap()

        # A row without a part has no translation.
        first_ids = np.full(self.num_rows, -1, np.int32)
        first_ids[: len(parts)] = [part.first_id for part in parts]
        return NestedMap(first_ids=first_ids)

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
        return distinct(_concatenated(ranked) for ranked in zip(*results, strict=False))


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
