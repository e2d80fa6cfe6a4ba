"""Text to text: lines into batches of one length, through a decoder, and back in their order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.decode import splitting
from lingvo_gshard.decode.decoder import Decoder
from lingvo_gshard.input import sentences
from lingvo_gshard.input.tokenizer import Tokenizer

# Lines that are sorted by length together, in batches: more waste fewer places of padding.
_WINDOW_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Attention:
    """What each piece of a translation attended to, the mean over the decoder's layers and heads.

    Attributes:
      source_pieces, target_pieces: the vocabularies' pieces, the EOS included.
      weights: a row for each target piece, a column for each source piece; rows sum to 1.
    """

    source_pieces: tuple[str, ...]
    target_pieces: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis of a line.

    Attributes:
      text: on one line, without tabs.
      score: its length-normalized log-probability; of a line that was translated in parts, the
        mean over its tokens.
      num_tokens: its length with the EOS.
      attention: None unless the decoder tells it, and of a line that was translated in parts.
    """

    text: str
    score: float
    num_tokens: int
    attention: Attention | None = None


_NOTHING = (Translation("", 0.0, 0),)


class Translator:
    """Translates lines with a decoder."""

    def __init__(self, decoder: Decoder, source: Tokenizer, target: Tokenizer) -> None:
        """Keeps its parts."""
        self._decoder, self._source, self._target = decoder, source, target

    def translate(self, lines: Iterable[str]) -> Iterator[tuple[Translation, ...]]:
        """The n best translations of each line, best first, in the lines' order.

        Each line gives one tuple, of one translation or more: a blank line's is empty text, and a
        line longer than the model takes is translated in parts. Lines are taken, and given back,
        some batches at a time.
        """
        window = _WINDOW_BATCHES * self._decoder.spec.batch_size
        lines = iter(lines)
        while some := list(itertools.islice(lines, window)):
            yield from self._window(some)

    def _window(self, lines: Sequence[str]) -> list[tuple[Translation, ...]]:
        parts = [splitting.split(line, self._fits) if line.strip() else [] for line in lines]
        found = iter(self._parts([part for of_line in parts for part in of_line]))
        return [_joined([next(found) for _ in of_line]) for of_line in parts]

    def _fits(self, text: str) -> bool:
        return len(self._source.encode(text)) <= self._decoder.spec.source_lengths[-1]

    def _parts(self, parts: Sequence[str]) -> list[tuple[Translation, ...]]:
        found: list[tuple[Translation, ...]] = [_NOTHING] * len(parts)
        spec = self._decoder.spec
        batches = sentences.decode_batches(
            parts, self._source, spec.batch_size, spec.source_lengths[-1], spec.source_lengths
        )
        for batch in batches:
            hypotheses = self._decoder(batch.features)
            for row, index in enumerate(batch.line_indices):
                if index >= 0:
                    of_row = {name: array[row] for name, array in hypotheses.items()}
                    found[index] = self._translations(parts[index], of_row)
        return found

    def _translations(self, part: str, row: dict[str, np.ndarray]) -> tuple[Translation, ...]:
        return tuple(
            Translation(
                # Pieces that stand for bytes can spell a line's end or a tab.
                " ".join(self._target.decode(row["ids"][i]).split()),
                float(row["scores"][i]),
                int(length),
                self._attention(part, row["ids"][i, :length], row["attention"][i])
                if "attention" in row
                else None,
            )
            for i, length in enumerate(row["lengths"])
            if length > 0
        )

    def _attention(self, part: str, ids: np.ndarray, weights: np.ndarray) -> Attention:
        source = self._source.pieces(self._source.encode(part))
        told = weights[: len(ids), : len(source)]
        rows = tuple(tuple(float(weight) for weight in row) for row in told)
        return Attention(tuple(source), tuple(self._target.pieces(ids)), rows)


def _joined(parts: Sequence[tuple[Translation, ...]]) -> tuple[Translation, ...]:
    """The i-th best of a line is that of all its parts."""
    if not parts:
        return _NOTHING
    if len(parts) == 1:
        return parts[0]
    return tuple(_one(hypotheses) for hypotheses in zip(*parts, strict=False))


def _one(parts: Sequence[Translation]) -> Translation:
    num_tokens = sum(part.num_tokens for part in parts)
    score = sum(part.score * part.num_tokens for part in parts) / num_tokens
    return Translation(" ".join(part.text for part in parts), score, num_tokens)
