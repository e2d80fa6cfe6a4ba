"""Decodes lines of text: makes rows of them, batches these by length, and keeps the lines' order.

What a line's rows are, and what the results of a row mean, is the business of a subclass: the
Translator (translator.py) or the Generator (generator.py). B batch, L length of rows.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.input import packing
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.spmd import processes

# This many batches of lines are sorted by length together; with more there is less padding.
_WINDOW_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention from target to source pieces, EOS included, over all layers and heads."""

    source_pieces: tuple[str, ...]
    target_pieces: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]  # A row for each target piece; rows sum to 1.


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation or continuation of a line. Its text has no tabs or line breaks."""

    text: str
    # The length-normalized log-probability; for a line in parts, the mean over their tokens.
    score: float
    num_tokens: int  # With EOS.
    # None for a line in parts, and from decoders that do not record it.
    attention: Attention | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """What a row decodes: a line, or a part of one."""

    ids: np.ndarray  # int32 [n], the tokens of the input.
    row_length: int  # The length of the shortest rows that hold it.
    # Of its sample, if the decoder samples: the user's seed, and the sample's number in the text.
    seed: tuple[int, int] = (0, 0)
    first_id: int = -1  # The first token of its translation, if its languages force one.


NBest = tuple[Hypothesis, ...]  # Best first; at least one. Of a beam, no text comes twice.


def distinct(hypotheses: Iterable[Hypothesis]) -> NBest:
    """Returns the hypotheses, best first, without those whose text a better one has.

    Different pieces may spell the same text.
    """
    best: dict[str, Hypothesis] = {}
    for hypothesis in hypotheses:
        best.setdefault(hypothesis.text, hypothesis)
    return tuple(best.values())


class TextDecoder:
    """Decodes lines with a decoder, `window` lines together."""

    def __init__(self, decoder: Decoder, source: Tokenizer, target: Tokenizer) -> None:
        """`source` is the vocabulary of what is read, and `target` that of what is written."""
        self.decoder = decoder
        self.spec = decoder.spec
        self.num_rows = decoder.spec.batch_size // decoder.share.count
        self.window = _WINDOW_BATCHES * self.num_rows
        self._source = source
        self._target = target

    def decode(self, lines: Iterable[str], first_number: int = 1, seed: int = 0) -> Iterator[NBest]:
        """Yields the n best results of each line, in order, a window of lines at a time.

        `first_number` is that of the first line; see `parts`, which also raises.
        """
        lines = iter(lines)
        while window := list(itertools.islice(lines, self.window)):
            yield from self.decode_together(window, first_number, seed)
            first_number += len(window)

    def decode_together(
        self, lines: Sequence[str], first_number: int = 1, seed: int = 0
    ) -> list[NBest]:
        """Returns the n best results of each line; the arguments are those of `decode`.

        All processes must call it, each with its own lines, but with the same ones where they share
        the rows.
        """
        parts_by_line: list[list[Part]] = []
        for number, line in enumerate(lines, start=first_number):
            parts_by_line.append(self.parts(line, number, seed))
        all_parts = list(itertools.chain.from_iterable(parts_by_line))
        return self.joined(parts_by_line, self.decode_parts(all_parts))

    def num_tokens(self, lines: Sequence[str]) -> list[int]:
        """Returns the number of input tokens of each line, with BOS or EOS."""
        return [len(self._source.encode(self._source.normalize(line))) for line in lines]

    def written(self, text: str) -> str:
        """Returns a text, such as a reference, in the form that the model writes, in one line."""
        return " ".join(self._target.normalize(text).split())

    def parts(self, line: str, number: int = 1, seed: int = 0) -> list[Part]:
        """Returns the parts of a line, each of which a row decodes.

        `number`, from 1, is the line's in its text. Its samples are functions of the line, its
        number and the seed. Raises ValueError for a line that the model cannot read.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no parts.")

    def joined(
        self, parts_by_line: Sequence[Sequence[Part]], results: Sequence[NBest]
    ) -> list[NBest]:
        """Returns the results of each line, given those of the parts of all lines, in order."""
        remaining = iter(results)
        lines = []
        for parts in parts_by_line:
            lines.append(self._joined_line(list(itertools.islice(remaining, len(parts)))))
        return lines

    def decode_parts(self, parts: Sequence[Part]) -> list[NBest]:
        """Returns the n best results of each part."""
        results: list[NBest] = [()] * len(parts)
        for indices, features in self._batches(parts):
            hypotheses = self.decoder(features)
            for row, index in enumerate(indices):
                arrays = {name: array[row] for name, array in hypotheses.items()}
                results[index] = self._hypotheses(parts[index].ids, arrays)
        return results

    # --- what a subclass decides ---

    def _joined_line(self, results: Sequence[NBest]) -> NBest:
        """Returns a line's results, given those of its parts."""
        raise NotImplementedError(f"{type(self).__name__} defines no _joined_line.")

    def _text(self, source: np.ndarray, ids: np.ndarray) -> str:
        """Returns the text of a hypothesis' tokens, given those of its input, both int32 [n]."""
        raise NotImplementedError(f"{type(self).__name__} defines no _text.")

    def _more_features(self, parts: Sequence[Part]) -> NestedMap:
        """Returns features besides spec.inputs, of a batch whose first rows hold a part each."""
        del parts
        return NestedMap()

    # --- batches ---

    def _row_length(self, num_tokens: int) -> int:
        """Returns the length of the shortest rows that hold so many tokens."""
        return next(length for length in self.spec.input_lengths if length >= num_tokens)

    def _batches(self, parts: Sequence[Part]) -> Iterator[tuple[list[int], NestedMap]]:
        """Yields the indices of a batch's parts, a row each, and its features.

        The shortest parts come first. The rows without a part are empty.
        """
        lengths = self.spec.input_lengths
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
                yield indices, self._features([parts[index] for index in indices], length)

    def _features(self, parts: Sequence[Part], length: int) -> NestedMap:
        """Returns a batch of rows of a length; the first rows hold a part each."""
        sizes = np.arange(self.num_rows) < len(parts)  # The parts in each row: 1 or 0.
        arrays = packing.side([part.ids for part in parts], sizes, length)
        inputs = dict(zip(self.spec.inputs, arrays, strict=True))
        return NestedMap(inputs, **self._more_features(parts))

    def _hypotheses(self, source: np.ndarray, row: dict[str, np.ndarray]) -> NBest:
        """Returns the hypotheses in a row of the decoder's results; missing ones have length 0.

        `source` are the tokens, int32 [n], that the row reads.
        """
        hypotheses = []
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

            text = self._text(source, ids)
            hypotheses.append(Hypothesis(text, float(row["scores"][i]), length, attention))

        # A text that is drawn twice is two samples.
        return tuple(hypotheses) if self.spec.is_sampled else distinct(hypotheses)
