"""Turning cleaned pairs into token ids with the two trained vocabularies."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

import sentencepiece

from data_prep import tsv

_NUM_THREADS = 2
# The same English stands beside many languages: its ids are kept, up to so many sentences.
_MAX_CACHED_SENTENCES = 500_000


@dataclasses.dataclass(frozen=True)
class EncodedPair:
    """Token ids of a pair, EOS last on both sides."""

    source_ids: list[int]
    target_ids: list[int]

    @property
    def max_pieces(self) -> int:
        """The length of the longer side."""
        return max(len(self.source_ids), len(self.target_ids))


class PairEncoder:
    """Encodes pairs; English sentences met before are not encoded again."""

    def __init__(self, source_model: pathlib.Path, target_model: pathlib.Path):
        self._source = sentencepiece.SentencePieceProcessor(model_file=str(source_model))
        self._target = sentencepiece.SentencePieceProcessor(model_file=str(target_model))
        self._english_ids: dict[str, list[int]] = {}

    def encode(self, pairs: Sequence[tsv.Pair]) -> list[EncodedPair]:
        """Returns the ids of each pair, in order."""
        sources = self._source.encode(
            [pair.source for pair in pairs], add_eos=True, num_threads=_NUM_THREADS
        )
        self._cache_english(pair.english for pair in pairs)
        return [
            EncodedPair(source_ids, self._english_ids[pair.english])
            for source_ids, pair in zip(sources, pairs, strict=True)
        ]

    def _cache_english(self, sentences: Iterable[str]) -> None:
        if len(self._english_ids) > _MAX_CACHED_SENTENCES:
            self._english_ids.clear()
        new = [s for s in dict.fromkeys(sentences) if s not in self._english_ids]
        ids = self._target.encode(new, add_eos=True, num_threads=_NUM_THREADS)
        self._english_ids.update(zip(new, ids, strict=True))
