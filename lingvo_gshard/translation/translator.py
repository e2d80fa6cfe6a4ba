"""Translates lines of text: splits long ones, batches them by length, and keeps their order."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import packing
from lingvo_gshard.input.normalization import normalize
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.spmd import processes
from lingvo_gshard.translation.bundle import Decoder

# This many batches of lines are sorted by length together; with more there is less padding.
_WINDOW_BATCHES = 16

# Marks after which long text may be cut, as the contents of a pattern's brackets.
SENTENCE_ENDS = ".!?;…。！？；।॥؟۔።"
CLOSING_MARKS = "\"'»”’)\\]"
PAUSES = ",:،、，："
DASHES = "-–—"

# Where to cut long text: after a sentence (and its quotes), at a comma or dash, between words. Some
# scripts have no spaces, so marks need none, but 3.500, 12:30 and example.com stay whole.
# translation/text_graph.py has the same rules for TensorFlow.
_BREAKS = (
    re.compile(rf"[{SENTENCE_ENDS}]++[{CLOSING_MARKS}]*+(?![0-9A-Za-z])\s*"),
    re.compile(rf"[{PAUSES}](?![0-9A-Za-z])\s*|\s[{DASHES}]\s"),
    re.compile(r"\s+"),
)
# A cut leaves at least this share of the text on both sides: the `1.` of `1. Mai` is no sentence.
_MIN_SHARE = 1 / 8


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention from target to source pieces, EOS included, over all layers and heads."""

    source_pieces: tuple[str, ...]
    target_pieces: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]  # A row for each target piece; rows sum to 1.


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis for a line. Its text has no tabs or line breaks."""

    text: str
    # The length-normalized log-probability; for a line in parts, the mean over their tokens.
    score: float
    num_tokens: int  # With EOS.
    # None for a line in parts, and from decoders that do not record it.
    attention: Attention | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """A line, or the part of a longer one that the model can translate."""

    ids: np.ndarray  # int32 [n], the source's tokens, EOS last.
    row_length: int  # The length of the shortest rows that hold it.


NBest = tuple[Translation, ...]  # Best first; at least one.
_NOTHING = (Translation("", 0.0, 0),)


class Translator:
    """Translates lines with a decoder, `window` lines together."""

    def __init__(self, decoder: Decoder, source: Tokenizer, target: Tokenizer) -> None:
        self.decoder = decoder
        self.spec = decoder.spec
        self.num_rows = decoder.spec.batch_size // decoder.share.count
        self.window = _WINDOW_BATCHES * self.num_rows
        self._source = source
        self._target = target

    def translate(self, lines: Iterable[str]) -> Iterator[NBest]:
        """Yields the n best translations of each line, in order, a window of lines at a time."""
        lines = iter(lines)
        while window := list(itertools.islice(lines, self.window)):
            yield from self.translate_together(window)

    def num_tokens(self, lines: Sequence[str]) -> list[int]:
        """Returns the number of source tokens of each line, with EOS."""
        return [len(self._source.encode(normalize(line))) for line in lines]

    def translate_together(self, lines: Sequence[str]) -> list[NBest]:
        """Returns the n best translations of each line; that of a blank line is empty.

        A line that is too long for the model is translated in parts. All processes must call it,
        each with its own lines, but with the same ones where they share the rows.
        """
        parts_by_line = [self.parts(line) for line in lines]
        all_parts = list(itertools.chain.from_iterable(parts_by_line))
        return joined(parts_by_line, self.translate_parts(all_parts))

    def parts(self, line: str) -> list[Part]:
        """Returns the parts of a line, each with the token of its target; none of a blank line."""
        beginning = self._beginning(line)
        longest = self.spec.source_lengths[-1]

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

        longest = self.spec.source_lengths[-1]
        if len(ids) > longest:  # Only a single character can be too long.
            logging.warning("Truncated %r from %d to %d pieces.", text, len(ids), longest)
            ids = packing.truncate(ids, longest)

        row_length = next(length for length in self.spec.source_lengths if length >= len(ids))
        return Part(ids, row_length)

    def translate_parts(self, parts: Sequence[Part]) -> list[NBest]:
        """Returns the n best translations of each part."""
        translations: list[NBest] = [_NOTHING] * len(parts)
        for indices, features in self._batches(parts):
            hypotheses = self.decoder(features)
            for row, index in enumerate(indices):
                arrays = {name: array[row] for name, array in hypotheses.items()}
                translations[index] = self._translations(parts[index].ids, arrays)
        return translations

    def _batches(self, parts: Sequence[Part]) -> Iterator[tuple[list[int], NestedMap]]:
        """Yields the indices of a batch's parts, a row each, and its features, int32 [B, L].

        The shortest parts come first. The rows without a part are empty.
        """
        lengths = self.spec.source_lengths
        shortest_first = sorted(range(len(parts)), key=lambda index: len(parts[index].ids))

        # The rows of a batch have one length, and its parts are neighbors in size.
        batches_by_length: list[list[list[int]]] = []
        for length in lengths:
            members = [index for index in shortest_first if parts[index].row_length == length]
            starts = range(0, len(members), self.num_rows)
            batches_by_length.append([members[start : start + self.num_rows] for start in starts])

        # All processes must call the program of a length equally often, so those that have fewer
        # batches add empty ones.
        counts = processes.largest([len(batches) for batches in batches_by_length])
        for length, batches, count in zip(lengths, batches_by_length, counts, strict=True):
            num_missing = count - len(batches)
            for indices in [*batches, *[[]] * num_missing]:
                yield indices, self._features([parts[index].ids for index in indices], length)

    def _features(self, sources: Sequence[np.ndarray], length: int) -> NestedMap:
        """Returns a batch of rows of a length; the first rows hold a source each."""
        sizes = np.arange(self.num_rows) < len(sources)  # The sources in each row: 1 or 0.
        arrays = packing.side(sources, sizes, length)
        return NestedMap(zip(packing.SOURCE, arrays, strict=True))

    def _translations(self, source: np.ndarray, row: dict[str, np.ndarray]) -> NBest:
        """Returns the translations in a row of the decoder's results; missing ones have length 0.

        `source` are the tokens, int32 [n], that the row translates.
        """
        translations = []
        for i in np.flatnonzero(row["lengths"]):
            length = int(row["lengths"][i])
            ids = row["ids"][i, :length]

            attention = None
            if "attention" in row:
                weights = row["attention"][i, :length, : len(source)].astype(float)
                attention = Attention(
                    source_pieces=tuple(self._source.pieces(source)),
                    target_pieces=tuple(self._target.pieces(ids)),
                    weights=tuple(tuple(of_piece) for of_piece in weights.tolist()),
                )

            # Byte pieces can spell line breaks and tabs.
            text = " ".join(self._target.decode(ids).split())
            translations.append(Translation(text, float(row["scores"][i]), length, attention))

        return tuple(translations)


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


def joined(parts_by_line: Sequence[Sequence[Part]], translations: Sequence[NBest]) -> list[NBest]:
    """Returns the translations of each line, given those of the parts of all lines, in order."""
    remaining = iter(translations)
    lines = []
    for parts in parts_by_line:
        lines.append(_joined_line(list(itertools.islice(remaining, len(parts)))))
    return lines


def _joined_line(parts: Sequence[NBest]) -> NBest:
    """Returns a line's translations: the i-th best of its parts form its own i-th best."""
    if not parts:
        return _NOTHING
    if len(parts) == 1:
        return parts[0]
    # Some parts may have fewer hypotheses than others; the line has as many as each part has.
    return tuple(_concatenated(ranked) for ranked in zip(*parts, strict=False))


def _concatenated(parts: Sequence[Translation]) -> Translation:
    num_tokens = sum(part.num_tokens for part in parts)
    score = sum(part.score * part.num_tokens for part in parts) / num_tokens
    return Translation(" ".join(part.text for part in parts), score, num_tokens)
