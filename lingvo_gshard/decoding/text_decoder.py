"""Decodes lines of text: makes rows from them, batches the rows by length, and keeps their order.

A subclass decides how a line becomes rows, and how their results become text: the Translator
(translator.py) or the Generator (generator.py). B batch, L length of rows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.bundle import Decoder
from lingvo_gshard.decoding.outcomes import MIN_END_LOG_PROB, Finish, NoResultError
from lingvo_gshard.input import packing
from lingvo_gshard.input.example_codec import EOS_ID
from lingvo_gshard.input.normalization import one_line
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.spmd import processes

# This many batches of lines are sorted by length together; more of them would need less padding.
_WINDOW_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention from target to source pieces, EOS included, over all layers and heads."""

    source_pieces: tuple[str, ...]
    target_pieces: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]  # A row for each target piece; rows sum to 1.


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a result."""

    id: int
    piece: str  # In the vocabulary, such as `▁dog`, or `</s>` for EOS.
    log_prob: float  # Given the tokens before it.


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation or continuation of a line.

    The text is free of tabs, line breaks and other control characters.
    """

    text: str
    # The length-normalized log-probability; for a line in parts, the mean over all their tokens.
    score: float
    num_tokens: int  # Including EOS.
    # None for a line in parts, and if the decoder does not record it.
    attention: Attention | None = None
    finish: Finish = Finish.STOP  # For a line in parts, LENGTH if any part was cut.
    tokens: tuple[Token, ...] = ()  # Including EOS; for a line in parts, of one after the other.


@dataclasses.dataclass(frozen=True)
class Part:
    """The input of one row: a line, or a part of one."""

    ids: np.ndarray  # int32 [n], the tokens of the input.
    row_length: int  # The length of the shortest rows that hold it.
    # If the decoder samples: the user's seed, and the sample's number in the text.
    seed: tuple[int, int] = (0, 0)
    first_id: int = -1  # The first token of its translation, if its languages force one.


# Best first, at least one for each line. The texts from a beam are distinct.
NBest = tuple[Hypothesis, ...]
OnLines = Callable[[int], None]  # Gets the number of further lines that are decoded.
OnBatch = Callable[[Sequence[int]], None]  # Gets the indices of parts that are decoded.


def distinct(hypotheses: Iterable[Hypothesis]) -> NBest:
    """Returns the hypotheses, best first, without any whose text a better one has.

    Different pieces may spell the same text.
    """
    best: dict[str, Hypothesis] = {}
    for hypothesis in hypotheses:
        best.setdefault(hypothesis.text, hypothesis)
    return tuple(best.values())


class TextDecoder:
    """Decodes lines with a decoder, `window` lines together."""

    def __init__(self, decoder: Decoder, source: Tokenizer, target: Tokenizer) -> None:
        """`source` is the vocabulary of the inputs, and `target` the vocabulary of the results."""
        self.decoder = decoder
        self.spec = decoder.spec
        self.num_rows = decoder.spec.batch_size // decoder.share.count
        self.window = _WINDOW_BATCHES * self.num_rows
        self._source = source
        self._target = target

    def decode(
        self,
        lines: Iterable[str],
        first_number: int = 1,
        seed: int = 0,
        on_lines: OnLines = lambda count: None,
    ) -> Iterator[NBest]:
        """Yields the n best results of each line, in order, a window of lines at a time.

        `first_number` is the number of the first line, `seed` the seed of samples. `on_lines` is
        called with the number of lines that a batch completes. Raises ValueError if the model
        cannot read a line, and NoResultError at a line without a result, after the results of the
        lines before it.
        """
        lines = iter(lines)
        while window := list(itertools.islice(lines, self.window)):
            yield from self._decoded(window, first_number, seed, on_lines)
            first_number += len(window)

    def decode_together(
        self,
        lines: Sequence[str],
        first_number: int = 1,
        seed: int = 0,
        on_lines: OnLines = lambda count: None,
    ) -> list[NBest]:
        """Returns the n best results of each line; the arguments and errors are as for `decode`.

        All processes must call it. Processes that share rows must pass the same lines; others each
        pass their own.
        """
        return list(self._decoded(lines, first_number, seed, on_lines))

    def _decoded(
        self, lines: Sequence[str], first_number: int, seed: int, on_lines: OnLines
    ) -> Iterator[NBest]:
        """Yields the n best results of lines that are decoded together."""
        parts_by_line: list[list[Part]] = []
        for number, line in enumerate(lines, start=first_number):
            parts_by_line.append(self.parts(line, number, seed))
        all_parts = list(itertools.chain.from_iterable(parts_by_line))
        on_batch = _counting_lines(parts_by_line, on_lines)
        yield from self.joined(parts_by_line, self.decode_parts(all_parts, on_batch), first_number)

    def num_tokens(self, lines: Sequence[str]) -> list[int]:
        """Returns the number of input tokens of each line, including BOS or EOS if it has one."""
        raise NotImplementedError(f"{type(self).__name__} defines no num_tokens.")

    def written(self, text: str) -> str:
        """Returns a text, such as a reference, as the model would write it, on one line."""
        return one_line(self._target.normalize(text))

    def parts(self, line: str, number: int = 1, seed: int = 0) -> list[Part]:
        """Returns the parts of a line, each for one row.

        `number`, from 1, is the line's number in its text. Its samples depend only on the line, its
        number and the seed. Raises ValueError if the model cannot read the line.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no parts.")

    def joined(
        self,
        parts_by_line: Sequence[Sequence[Part]],
        results: Sequence[NBest],
        first_number: int = 1,
    ) -> Iterator[NBest]:
        """Yields the results of each line in order, from the results of all lines' parts.

        Raises NoResultError, with the line's number, if one of its parts lacks a result.
        """
        remaining = iter(results)
        for number, parts in enumerate(parts_by_line, first_number):
            of_parts = list(itertools.islice(remaining, len(parts)))
            if not all(of_parts):
                raise NoResultError(f"line {number}", self.spec.reading.noun, number)
            yield self._joined_line(of_parts)

    def decode_parts(
        self, parts: Sequence[Part], on_batch: OnBatch = lambda indices: None
    ) -> list[NBest]:
        """Returns the n best results of each part, or () if the model's numbers are not finite.

        `on_batch` is called with the indices of a batch's parts once they are decoded.
        """
        results: list[NBest] = [()] * len(parts)
        for indices, features in self._batches(parts):
            hypotheses = self.decoder(features)
            for row, index in enumerate(indices):
                arrays = {name: array[row] for name, array in hypotheses.items()}
                results[index] = self._hypotheses(parts[index].ids, arrays)
            on_batch(indices)
        return results

    # --- defined by subclasses ---

    def _joined_line(self, results: Sequence[NBest]) -> NBest:
        """Returns a line's results, given its parts' results."""
        raise NotImplementedError(f"{type(self).__name__} defines no _joined_line.")

    def _text(self, source: np.ndarray, ids: np.ndarray) -> str:
        """Returns the text of a hypothesis' tokens, given its input's tokens, both int32 [n]."""
        raise NotImplementedError(f"{type(self).__name__} defines no _text.")

    def _more_features(self, parts: Sequence[Part]) -> NestedMap:
        """Returns the other features of a batch, whose first rows contain the parts, in order."""
        return NestedMap()

    # --- batches ---

    def _row_length(self, num_tokens: int) -> int:
        """Returns the length of the shortest rows that hold this many tokens."""
        return next(length for length in self.spec.input_lengths if length >= num_tokens)

    def _batches(self, parts: Sequence[Part]) -> Iterator[tuple[list[int], NestedMap]]:
        """Yields the indices of a batch's parts, one for each row, and its features.

        The shortest parts come first. Rows without a part are empty.
        """
        lengths = self.spec.input_lengths
        shortest_first = sorted(range(len(parts)), key=lambda index: len(parts[index].ids))

        # The rows of a batch have one length, and its parts are of similar size.
        batches_by_length: list[list[list[int]]] = []
        for length in lengths:
            members = [index for index in shortest_first if parts[index].row_length == length]
            starts = range(0, len(members), self.num_rows)
            batches_by_length.append([members[start : start + self.num_rows] for start in starts])

        # All processes must call the program of a length equally often, so processes with fewer
        # batches add empty ones.
        counts = processes.largest([len(batches) for batches in batches_by_length])
        for length, batches, count in zip(lengths, batches_by_length, counts, strict=True):
            num_missing = count - len(batches)
            for indices in [*batches, *[[]] * num_missing]:
                yield indices, self._features([parts[index] for index in indices], length)

    def _features(self, parts: Sequence[Part], length: int) -> NestedMap:
        """Returns a batch of rows of one length; the first rows contain one part each."""
        sizes = np.arange(self.num_rows) < len(parts)  # The number of parts in each row: 1 or 0.
        arrays = packing.side([part.ids for part in parts], sizes, length)
        inputs = dict(zip(self.spec.reading.features, arrays, strict=True))
        return NestedMap(inputs, **self._more_features(parts))

    def _hypotheses(self, source: np.ndarray, row: dict[str, np.ndarray]) -> NBest:
        """Returns the hypotheses in a row of the decoder's results; missing ones have length 0.

        `source` has the tokens, int32 [n], that the row reads.
        """
        hypotheses = []
        for i in np.flatnonzero((row["lengths"] > 0) & np.isfinite(row["scores"])):
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

            hypotheses.append(
                Hypothesis(
                    text=self._text(source, ids),
                    score=float(row["scores"][i]),
                    num_tokens=length,
                    attention=attention,
                    finish=_finish(row["ids"][i], length, row["token_log_probs"][i]),
                    tokens=self._tokens(ids, row["token_log_probs"][i]),
                )
            )

        # A text that is drawn twice counts as two samples.
        return tuple(hypotheses) if self.spec.is_sampled else distinct(hypotheses)

    def _tokens(self, ids: np.ndarray, log_probs: np.ndarray) -> tuple[Token, ...]:
        """Returns the tokens of a hypothesis; `log_probs` may go on beyond them."""
        pieces = self._target.pieces(ids)
        return tuple(map(Token, ids.tolist(), pieces, log_probs[: len(ids)].tolist()))


def _counting_lines(parts_by_line: Sequence[Sequence[Part]], on_lines: OnLines) -> OnBatch:
    """Returns what calls `on_lines` with the number of lines that a batch of parts completes."""
    lines: list[int] = []  # The line of each part.
    num_missing = [len(parts) for parts in parts_by_line]
    for line, count in enumerate(num_missing):
        lines += [line] * count
    on_lines(num_missing.count(0))  # A blank line may have no parts.

    def on_batch(indices: Sequence[int]) -> None:
        num_complete = 0
        for index in indices:
            line = lines[index]
            num_missing[line] -= 1
            num_complete += num_missing[line] == 0
        on_lines(num_complete)

    return on_batch


def _finish(ids: np.ndarray, length: int, log_probs: np.ndarray) -> Finish:
    """Returns why a hypothesis of `length` tokens ends; `ids` and `log_probs` are of shape [T].

    The search ends all hypotheses at the maximum length T, even where EOS is improbable.
    """
    if length < len(ids):
        return Finish.STOP
    is_end = ids[-1] == EOS_ID and log_probs[-1] > MIN_END_LOG_PROB
    return Finish.STOP if is_end else Finish.LENGTH
