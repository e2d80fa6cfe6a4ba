"""Text to text: lines into batches, through the beam search, and back in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input import decoding
from lingvo_gshard.input.tokenizer import Tokenizer
from lingvo_gshard.sharding.partitioning import TensorSpec
from lingvo_gshard.train.estimator import TPUEstimator


@dataclasses.dataclass(frozen=True)
class Translation:
    """The best hypothesis of a line, its length-normalized log-probability and its length."""

    text: str
    score: float
    num_tokens: int


class Translator:
    """Translates lines with an estimator's latest checkpoint."""

    def __init__(
        self, estimator: TPUEstimator, source: Tokenizer, target: Tokenizer, decode: Params
    ) -> None:
        """Keeps its parts; `decode` is the experiment's branch of that name."""
        self._estimator, self._source, self._target = estimator, source, target
        self._decode = decode

    def translate(self, lines: Sequence[str]) -> list[Translation]:
        """One Translation a line, in order; a blank line stays blank.

        Raises:
          ValueError: there is no checkpoint.
        """
        spoken = [i for i, line in enumerate(lines) if line.strip()]
        results = [Translation("", 0.0, 0)] * len(lines)
        if not spoken:
            return results
        batches = _Batches(
            list(
                decoding.decode_batches(
                    [lines[i] for i in spoken],
                    self._source,
                    self._decode.batch_size,
                    self._decode.max_source_len,
                )
            )
        )
        rows = self._estimator.predict(lambda _: batches)
        for index, row in zip(batches.line_indices, rows, strict=True):
            if index >= 0:
                results[spoken[index]] = self._best(row)
        return results

    def _best(self, row: dict[str, np.ndarray]) -> Translation:
        # Pieces that stand for bytes can spell a line's end.
        text = " ".join(self._target.decode(row["ids"][0]).splitlines())
        return Translation(text, float(row["scores"][0]), int(row["lengths"][0]))


class _Batches:
    """Decode batches as an estimator's input."""

    def __init__(self, batches: list[decoding.DecodeBatch]) -> None:
        self._batches = batches

    @property
    def specs(self) -> NestedMap:
        features = self._batches[0].features
        return NestedMap(
            features=features.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL"))
        )

    @property
    def line_indices(self) -> list[int]:
        return [int(i) for batch in self._batches for i in batch.line_indices]

    def __iter__(self) -> Iterator[NestedMap]:
        return iter(NestedMap(features=batch.features) for batch in self._batches)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        raise ValueError(f"decode batches have no state to set, got {state}.")
