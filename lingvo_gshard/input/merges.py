"""BPE-dropout (Provilkov et al., 2020): a model sees each word spelled in more than one way.

A piece of the vocabulary was merged from two shorter ones. In training, each token is undone into
the two with a probability, and so are its parts in turn. This needs no text, only token ids.
"""

from collections.abc import Sequence

import numpy as np

from lingvo_gshard.input.example_codec import Example
from lingvo_gshard.input.tokenizer import Tokenizer

_NONE = -1


class MergeDropout:
    """Undoes merges of the source's and the target's pieces with the same probability."""

    def __init__(self, rate: float, source: Tokenizer, target: Tokenizer) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"merge_dropout {rate}: expected 0 or more, and less than 1")
        self._rate = rate
        self._parts = [parts_of(each.pieces(range(each.vocab_size))) for each in (source, target)]

    def __call__(self, examples: Sequence[Example], rng: np.random.Generator) -> list[Example]:
        """Returns the examples with some of their tokens undone."""
        sides = [
            self._undone([getattr(example, name) for example in examples], parts, rng)
            for name, parts in zip(("source_ids", "target_ids"), self._parts, strict=True)
        ]
        return [Example(*pair) for pair in zip(*sides, strict=True)]

    def _undone(
        self, sentences: list[np.ndarray], parts: np.ndarray, rng: np.random.Generator
    ) -> list[np.ndarray]:
        tokens = np.concatenate(sentences)
        owners = np.repeat(np.arange(len(sentences)), [len(ids) for ids in sentences])
        is_new = np.ones(len(tokens), bool)
        while (is_undone := is_new & self._drawn(parts[tokens, 0], rng)).any():
            counts = 1 + is_undone
            first = np.cumsum(counts) - counts  # Of each token's parts.
            made = np.repeat(tokens, counts)
            made[first[is_undone]], made[first[is_undone] + 1] = parts[tokens[is_undone]].T
            tokens, owners, is_new = made, np.repeat(owners, counts), np.repeat(is_undone, counts)
        return np.split(tokens, np.flatnonzero(np.diff(owners)) + 1)

    def _drawn(self, first_parts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return (first_parts != _NONE) & (rng.random(len(first_parts)) < self._rate)


def parts_of(pieces: Sequence[str]) -> np.ndarray:
    """Returns the two ids that each of a vocabulary's pieces was merged from, int32 [V, 2]; or -1.

    Pieces are in the order of their merges. Of all pairs that spell a piece, the one whose later
    piece was made first is taken, as BPE would. Marks such as </s>, <2de> and <0x0A> stay whole.
    """
    # Single characters are there before all merges.
    ranks = {piece: (i if len(piece) > 1 else _NONE) for i, piece in enumerate(pieces)}
    ids = {piece: i for i, piece in enumerate(pieces)}
    parts = np.full((len(pieces), 2), _NONE, np.int32)
    for i, piece in enumerate(pieces):
        if piece.startswith("<") and piece.endswith(">"):
            continue
        cuts = ((piece[:n], piece[n:]) for n in range(1, len(piece)))
        made = [pair for pair in cuts if all(ranks.get(each, i) < i for each in pair)]
        if made:
            best = min(made, key=lambda pair: max(ranks[each] for each in pair))
            parts[i] = [ids[each] for each in best]
    return parts
