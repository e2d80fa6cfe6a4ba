"""Translates lines of text: splits lines that are too long for the model, and joins the parts."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding import joints
from lingvo_gshard.decoding.outcomes import finish_of
from lingvo_gshard.decoding.text_decoder import Hypothesis, NBest, Part, TextDecoder, distinct
from lingvo_gshard.input import packing
from lingvo_gshard.input.normalization import one_line

# Marks after which long text may be cut, as the contents of a pattern's brackets.
SENTENCE_ENDS = ".!?;…。！？；।॥؟۔።"
CLOSING_MARKS = "\"'»”’)\\]"
PAUSES = ",:،、，："
DASHES = "-–—"

# Where to cut long text: after a sentence (and its quotes), at a comma or dash, or between words.
# Marks need not be followed by a space, since some scripts do not use spaces; but 3.500, 12:30 and
# example.com stay whole.
# decoding/text_graph.py has the same rules for TensorFlow.
_BREAKS = (
    re.compile(rf"[{SENTENCE_ENDS}]++[{CLOSING_MARKS}]*+(?![0-9A-Za-z])\s*"),
    re.compile(rf"[{PAUSES}](?![0-9A-Za-z])\s*|\s[{DASHES}]\s"),
    re.compile(r"\s+"),
)
# A cut leaves at least this share of the text on both sides: `1.` in `1. Mai` is not a sentence.
_MIN_SHARE = 1 / 8


_NOTHING = (Hypothesis("", 0.0, 0),)


@dataclasses.dataclass(frozen=True)
class _Languages:
    """How the model is given a line's languages: in one of three ways, or not at all."""

    text: str = ""  # Text before the line's own, which contains the target's piece.
    source_ids: tuple[int, ...] = ()  # Ids before the line's own.
    first_id: int = -1  # The forced first token of the translation.


class Translator(TextDecoder):
    """Translates lines. The translation of a blank line is empty and does not run the model.

    If a line's languages have to be named, it begins with DecoderSpec.beginning.
    """

    def parts(self, line: str, number: int = 1, seed: int = 0) -> list[Part]:
        """Returns the parts of a line, each with its languages' tokens; no parts for a blank line.

        A line that is too long for the model has several parts. `number` and `seed` are not used:
        the program has its own seed of samples. Raises ValueError if a line has to begin with its
        languages and does not.
        """
        languages, text = self._divided(line)
        longest = self.spec.input_lengths[-1]

        def fits(text: str) -> bool:
            return len(self._ids(languages, text)) <= longest

        pieces = split(self._source.normalize(text), fits)
        return [self._part(languages, piece) for piece in pieces if piece]

    def num_tokens(self, lines: Sequence[str]) -> list[int]:
        """Returns the number of input tokens of each line, including EOS.

        Raises ValueError if a line has to begin with its languages and does not.
        """
        counts: list[int] = []
        for line in lines:
            languages, text = self._divided(line)
            counts.append(len(self._ids(languages, self._source.normalize(text))))
        return counts

    def source(self, line: str) -> str:
        """Returns the text of a line on one line, without the languages at its beginning.

        Raises ValueError if a line has to begin with its languages and does not.
        """
        _, text = self._divided(line)
        return " ".join(text.split())

    def _divided(self, line: str) -> tuple[_Languages, str]:
        """Returns the languages at a line's beginning, and its own text."""
        if self.spec.sources:
            source, _, rest = line.partition(" ")
            target, _, text = rest.partition(" ")
            self.spec.beginning(target, source)  # Raises ValueError for unknown languages.
            source_id = self._source.languages[source]
            target_id = self._target.languages[target]
            return _Languages(source_ids=(source_id,), first_id=target_id), text

        for target in self.spec.targets:
            beginning = self.spec.beginning(target)
            if line.startswith(beginning):
                return _Languages(beginning), line.removeprefix(beginning)
        return _Languages(), line

    def _ids(self, languages: _Languages, text: str) -> list[int]:
        """Returns the ids of a normalized source, including EOS."""
        return [*languages.source_ids, *self._source.encode(languages.text + text)]

    def _part(self, languages: _Languages, text: str) -> Part:
        ids = np.array(self._ids(languages, text), np.int32)

        longest = self.spec.input_lengths[-1]
        if len(ids) > longest:  # Only a single character can be too long.
            logging.warning("Truncated %r from %d to %d pieces.", text, len(ids), longest)
            ids = packing.truncate(ids, longest)

        return Part(ids, self._row_length(len(ids)), first_id=languages.first_id)

    def _more_features(self, parts: Sequence[Part]) -> NestedMap:
        """Returns the first token of each row's translation, if languages force one."""
        if not self.spec.sources:
            return NestedMap()

        # Rows without a part keep -1.
        first_ids = np.full(self.num_rows, -1, np.int32)
        first_ids[: len(parts)] = [part.first_id for part in parts]
        return NestedMap(first_ids=first_ids)

    def _text(self, source: np.ndarray, ids: np.ndarray) -> str:
        return one_line(self._target.decode(ids))

    def _joined_line(self, results: Sequence[NBest]) -> NBest:
        """Returns a line's translations: the i-th best of its parts form its own i-th best."""
        if not results:
            return _NOTHING
        if len(results) == 1:
            return results[0]
        # Parts may have different numbers of hypotheses; the line gets the smallest number.
        return distinct(_concatenated(ranked) for ranked in zip(*results, strict=False))


def split(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Splits text into parts that fit, in order and without the space between them.

    A text that does not fit is cut in two near its middle: after a sentence if possible, else at a
    comma, between words, or within a word, down to single characters.
    """
    text = text.strip()
    if len(text) <= 1 or fits(text):
        return [text]
    middle = _middle(text)
    return split(text[:middle], fits) + split(text[middle:], fits)


def _middle(text: str) -> int:
    """Returns the best place to cut near the middle of a text."""
    middle = len(text) // 2
    shortest = _MIN_SHARE * len(text)

    for pattern in _BREAKS:
        cuts = [match.end() for match in pattern.finditer(text)]
        cuts = [cut for cut in cuts if min(cut, len(text) - cut) >= shortest]
        if cuts:
            return min(cuts, key=lambda cut: abs(cut - middle))

    return middle


def _concatenated(parts: Sequence[Hypothesis]) -> Hypothesis:
    num_tokens = sum(part.num_tokens for part in parts)
    score = sum(part.score * part.num_tokens for part in parts) / num_tokens
    text = joints.joined([part.text for part in parts])
    finish = finish_of(part.finish for part in parts)
    tokens = tuple(itertools.chain.from_iterable(part.tokens for part in parts))
    return Hypothesis(text, score, num_tokens, finish=finish, tokens=tokens)
