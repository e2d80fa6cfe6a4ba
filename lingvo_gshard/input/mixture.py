"""Which example comes next: temperature sampling over languages, or one pass over all.

A language of n_l training examples is drawn with probability p_l proportional to n_l ** (1/T).
T=1 keeps the proportions of the data, a large T makes all languages equal. Section 4.1 speaks of
the imbalance alone; T=5 is that of the work it builds on (Arivazhagan et al. 2019).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from grain.experimental import index_shuffle

from lingvo_gshard.input import manifest
from lingvo_gshard.input.example_codec import Example
from lingvo_gshard.input.records import RecordSource

_SHUFFLE_ROUNDS = 4  # Grain's own number.
# Grain's shuffle finds a place at once, but permutes at least so many: of a hundred examples it
# takes 0.3 ms for one, of more than this 4 us.
_MAX_PERMUTED = 1 << 16


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """How languages are mixed.

    Attributes:
        temperature: T.
        max_repeats: an example of a small language is drawn at most so many times while as many
            are drawn as there are of all languages; None for no limit.
        shuffle: whether each language's examples are, anew every time they are used up.
        seed: of everything random.
    """

    temperature: float
    max_repeats: float | None
    shuffle: bool
    seed: int


def sampling_weights(
    counts: Sequence[int], temperature: float, max_repeats: float | None
) -> np.ndarray:
    """Returns the sampling probabilities p_l, float64 [len(counts)], which sum to 1.

    Where p_l would repeat a language more than `max_repeats` times in sum(counts) draws it is
    lowered to that, and the others share the rest in their proportions.

    Raises:
        ValueError: a temperature or a limit below 1, or a language without examples.
    """
    if temperature < 1:
        raise ValueError(f"temperature {temperature}: expected at least 1")
    if max_repeats is not None and max_repeats < 1:
        raise ValueError(f"max_repeats {max_repeats}: expected at least 1")
    if not counts or min(counts) < 1:
        raise ValueError(f"example counts {list(counts)}: expected at least 1 of each language")
    sizes = np.asarray(counts, np.float64)
    weights = sizes ** (1 / temperature)
    limits = (math.inf if max_repeats is None else max_repeats) * sizes / sizes.sum()
    is_limited = np.zeros(len(sizes), bool)
    while True:
        rest = 1 - limits[is_limited].sum()
        shares = np.where(is_limited, limits, rest * weights / weights[~is_limited].sum())
        if not (shares > limits * (1 + 1e-12)).any():
            return shares
        # Who gets more as others are limited may in turn exceed its limit.
        is_limited |= shares > limits


def languages_of(
    data: manifest.Manifest, split: str, codes: Sequence[str] | None
) -> tuple[manifest.Language, ...]:
    """The languages of these codes; None: all that have examples in the split.

    Raises:
        ValueError: no such split or language, or one without examples in it.
    """
    if split not in manifest.SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(manifest.SPLITS)}")
    if codes is None:
        found = tuple(language for language in data.languages if language.num_examples(split))
    else:
        found = tuple(data.language(code) for code in codes)
    if not found:
        raise ValueError(f"no language has examples in split {split!r}")
    for language in found:
        if not language.num_examples(split):
            raise ValueError(f"language {language.code} has no examples in split {split!r}")
    return found


class Mixture:
    """The endless stream, as a function of a position: what lies between two is read at once.

    Language l has given floor(p_l * x + phase_l) examples up to position x, so that any stretch
    holds the languages in their proportions, to within one example of each.
    """

    def __init__(self, sources: Sequence[RecordSource], config: MixtureConfig) -> None:
        """Raises ValueError as `sampling_weights`."""
        self._sources, self._config = sources, config
        counts = [len(source) for source in sources]
        self.weights = sampling_weights(counts, config.temperature, config.max_repeats)
        rng = np.random.default_rng(config.seed)
        # Else all languages would give their first example at once.
        self._phases = rng.random(len(sources))
        # Languages of equal size must not be shuffled alike: their English may be the same.
        self._seeds = rng.integers(0, 2**32, len(sources))

    def read(self, start: int, end: int) -> list[Example]:
        """The examples between two positions, in order: about end - start of them."""
        first, last = self._given_before(start), self._given_before(end)
        numbers = [np.arange(*bounds) for bounds in zip(first, last, strict=True)]
        # Where each one's language gives it.
        places = [
            (number + 1 - phase) / weight
            for number, phase, weight in zip(numbers, self._phases, self.weights, strict=True)
        ]
        examples: list[Example] = []
        for language, (source, number) in enumerate(zip(self._sources, numbers, strict=True)):
            examples += source.read(self._records(language, number))
        order = np.argsort(np.concatenate(places), kind="stable")
        return [examples[i] for i in order]

    def _given_before(self, position: int) -> np.ndarray:
        return np.floor(self.weights * position + self._phases).astype(np.int64)

    def _records(self, language: int, numbers: np.ndarray) -> np.ndarray:
        """The records of a language's examples with these numbers, counted over all epochs."""
        size = len(self._sources[language])
        epochs, indices = np.divmod(numbers, size)
        if not self._config.shuffle:
            return indices
        records = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            is_of_epoch = epochs == epoch
            seed = int(self._seeds[language] + epoch) % 2**32
            records[is_of_epoch] = _shuffled(indices[is_of_epoch], size, seed)
        return records


def _shuffled(indices: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Where a permutation of range(size) takes int [n] indices."""
    if size <= _MAX_PERMUTED:
        return _permutation(size, seed)[indices]
    places = (_place(int(index), size, seed) for index in indices)
    return np.fromiter(places, np.int64, len(indices))


def _place(index: int, size: int, seed: int) -> int:
    # Of 4**k + 1 indices Grain 0.2.18 takes two to the same place. Of one more it does not: what
    # falls outside then goes on to where its place goes.
    last = size - 1 if (size - 1) & (size - 2) else size
    while (index := index_shuffle(index, last, seed, _SHUFFLE_ROUNDS)) >= size:
        pass
    return index


@functools.lru_cache(maxsize=256)  # Of as many languages, at most 32 MiB.
def _permutation(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size).astype(np.uint16)


class OnePass:
    """Every example once: language after language, or all of them shuffled."""

    def __init__(self, sources: Sequence[RecordSource], shuffle: bool, seed: int) -> None:
        self._sources = sources
        sizes = [len(source) for source in sources]
        self._language = np.repeat(np.arange(len(sizes)), sizes)
        self._record = np.concatenate([np.arange(size) for size in sizes])
        if shuffle:
            order = np.random.default_rng(seed).permutation(len(self._record))
            self._language, self._record = self._language[order], self._record[order]

    def __len__(self) -> int:
        return len(self._record)

    def lengths(self, start: int, end: int) -> np.ndarray:
        """int64 [n, 2], tokens of both sides of what lies from `start` to before `end`."""
        languages, records = self._language[start:end], self._record[start:end]
        found = np.empty((len(languages), 2), np.int64)
        for language in np.unique(languages):
            is_of_language = languages == language
            found[is_of_language] = self._sources[language].lengths[records[is_of_language]]
        return found

    def read(self, numbers: np.ndarray) -> list[Example]:
        """The examples of int [n], in their order."""
        languages, records = self._language[numbers], self._record[numbers]
        found: dict[int, Example] = {}
        for language in np.unique(languages):
            places = np.flatnonzero(languages == language)
            examples = self._sources[language].read(records[places])
            found |= dict(zip(places.tolist(), examples, strict=True))
        return [found[place] for place in range(len(languages))]
