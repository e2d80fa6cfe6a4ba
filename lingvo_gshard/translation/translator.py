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
# Where to cut long text: after a sentence (and its quotes), at a comma or dash, between words. Some
# scripts have no spaces, so marks need none, but 3.500, 12:30 and example.com stay whole.
_BREAKS = (
    re.compile(r"[.!?;…。！？；।॥؟۔።]++[\"'»”’)\]]*+(?![0-9A-Za-z])\s*"),
    re.compile(r"[,:،、，：](?![0-9A-Za-z])\s*|\s[-–—]\s"),
    re.compile(r"\s+"),
)


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
    score: float  # The length-normalized log-probability; of parts, the mean over their tokens.
    num_tokens: int  # With EOS.
    attention: Attention | None = None  # Not for a line in parts, nor from all decoders.


@dataclasses.dataclass(frozen=True)
class Part:
    """A line, or the part of a longer one that the model can translate."""

    ids: np.ndarray  # int32 [n], the source's tokens, EOS last.
    row_length: int  # That of the shortest rows that hold it.


NBest = tuple[Translation, ...]  # Best first; at least one.
_NOTHING = (Translation("", 0.0, 0),)


class Translator:
    """Translates lines with a decoder, `window` lines together."""

    def __init__(self, decoder: Decoder, source: Tokenizer, target: Tokenizer) -> None:
        self.decoder, self._source, self._target = decoder, source, target
        self.spec = decoder.spec
        self.num_rows = decoder.spec.batch_size // decoder.share.count
        self.window = _WINDOW_BATCHES * self.num_rows

    def translate(self, lines: Iterable[str]) -> Iterator[NBest]:
        """Yields the n best translations of each line, in order, a window of lines at a time."""
        lines = iter(lines)
        while some := list(itertools.islice(lines, self.window)):
            yield from self.translate_together(some)

    def num_tokens(self, lines: Sequence[str]) -> list[int]:
        """Returns the number of source tokens of each line, with EOS."""
        return [len(self._source.encode(normalize(line))) for line in lines]

    def translate_together(self, lines: Sequence[str]) -> list[NBest]:
        """Returns the n best translations of each line; that of a blank line is empty.

        A line that is too long for the model is translated in parts. All processes must call it,
        each with its own lines, but with the same ones where they share the rows.
        """
        parts = list(map(self.parts, lines))
        found = iter(self.translate_parts(list(itertools.chain(*parts))))
        return [joined([next(found) for _ in of_line]) for of_line in parts]

    def parts(self, line: str) -> list[Part]:
        """Returns the parts of a line, each with the token of its target; none of a blank line."""
        beginnings = map(self.spec.beginning, self.spec.targets)
        beginning = next(filter(line.startswith, beginnings), "")
        *_, longest = lengths = self.spec.source_lengths

        def encoded(text: str) -> list[int]:
            return self._source.encode(beginning + text)

        def made(text: str) -> Part:
            ids = np.array(encoded(text), np.int32)
            if len(ids) > longest:  # Only a single character can be too long.
                logging.warning("Truncated %r from %d to %d pieces.", text, len(ids), longest)
                ids = packing.truncate(ids, longest)
            return Part(ids, next(n for n in lengths if n >= len(ids)))

        text = normalize(line.removeprefix(beginning))
        texts = split(text, lambda text: len(encoded(text)) <= longest)
        return list(map(made, filter(None, texts)))

    def translate_parts(self, parts: Sequence[Part]) -> list[NBest]:
        """Returns the n best translations of each part."""
        found: list[NBest] = [_NOTHING] * len(parts)
        for indices, features in self._batches(parts):
            hypotheses = self.decoder(features)
            for row, index in enumerate(indices):
                arrays = {name: array[row] for name, array in hypotheses.items()}
                found[index] = self._translations(parts[index].ids, arrays)
        return found

    def _batches(self, parts: Sequence[Part]) -> Iterator[tuple[list[int], NestedMap]]:
        """Yields the indices of a batch's parts, a row each, and its features, int32 [B, L].

        The shortest parts come first. The rows without a part are empty.
        """
        shortest_first = sorted(range(len(parts)), key=lambda index: len(parts[index].ids))
        lengths, batches = self.spec.source_lengths, list[list[list[int]]]()
        for length in lengths:
            members = [index for index in shortest_first if parts[index].row_length == length]
            starts = range(0, len(members), self.num_rows)
            batches.append([members[start : start + self.num_rows] for start in starts])
        # All processes call the program of a length equally often.
        counts = processes.largest([len(of_length) for of_length in batches])
        for length, count, of_length in zip(lengths, counts, batches, strict=True):
            for indices in itertools.chain(of_length, [[]] * (count - len(of_length))):
                ids = [parts[index].ids for index in indices]
                arrays = packing.side(ids, np.arange(self.num_rows) < len(indices), length)
                yield indices, NestedMap(zip(packing.SOURCE, arrays, strict=True))

    def _translations(self, source: np.ndarray, row: dict[str, np.ndarray]) -> NBest:
        found = []
        for i in np.flatnonzero(row["lengths"]):
            length, attention = int(row["lengths"][i]), None
            ids = row["ids"][i, :length]
            if "attention" in row:
                weights = row["attention"][i, :length, : len(source)].astype(float).tolist()
                pieces = tuple(self._source.pieces(source)), tuple(self._target.pieces(ids))
                attention = Attention(*pieces, tuple(map(tuple, weights)))
            # Byte pieces can spell line breaks and tabs.
            text = " ".join(self._target.decode(ids).split())
            found.append(Translation(text, float(row["scores"][i]), length, attention))
        return tuple(found)


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
    for pattern in _BREAKS:
        ends = [match.end() for match in pattern.finditer(text) if match.end() < len(text)]
        # A part of a few letters is no sentence, as in `1. Mai`.
        ends = [end for end in ends if min(end, len(text) - end) * 8 >= len(text)]
        if ends:
            return min(ends, key=lambda end: abs(end - middle))
    return middle


def joined(parts: Sequence[NBest]) -> NBest:
    """Joins the translations of a line's parts: the i-th best ones form the line's i-th best."""
    if len(parts) <= 1:
        return parts[0] if parts else _NOTHING
    return tuple(map(_concatenated, zip(*parts, strict=False)))


def _concatenated(parts: Sequence[Translation]) -> Translation:
    num_tokens = sum(part.num_tokens for part in parts)
    score = sum(part.score * part.num_tokens for part in parts) / num_tokens
    return Translation(" ".join(part.text for part in parts), score, num_tokens)
