"""Temperature sampling over languages, which decides the next training example.

A language of n_l training examples is drawn with probability p_l proportional to n_l ** (1/T). T=1
keeps the proportions of the data; a large T makes all languages equally likely. Section 4.1 does
not give T; T=5 is the value of Arivazhagan et al. (2019), on which it builds.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from lingvo_gshard.core.hyperparams import AnyParams
from lingvo_gshard.core.late import grain
from lingvo_gshard.input import manifest

_SHUFFLE_ROUNDS = 4  # Grain's own number.
# Up to this size the whole permutation is stored: Grain takes 0.3 ms for each of 100 indices.
_MAX_PERMUTED = 1 << 16
_TOLD_LANGUAGES = 5  # The most languages that a warning names.


_Example = TypeVar("_Example")


class Source(Protocol[_Example]):
    """The examples of some languages: `sizes` has their counts, and indices run over them all."""

    sizes: list[int]

    def read(self, indices: np.ndarray) -> list[_Example]:
        """Returns the examples at int [n] indices, in their order."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How often each language is drawn."""

    probabilities: np.ndarray  # p_l, float64 [languages]; they sum to 1.
    is_limited: np.ndarray  # bool [languages], whether p_l is at the limit of max_repeats.


def sampling(counts: Sequence[int], temperature: float, max_repeats: float | None) -> Sampling:
    """Returns how often languages with these numbers of examples, 1 or more, are drawn.

    If p_l would repeat a language more than `max_repeats` times in sum(counts) draws, it is lowered
    to that limit, and the other languages share the rest in their proportions. Raises ValueError
    if the temperature or the limit is below 1.
    """
    if temperature < 1:
        raise ValueError(f"temperature {temperature}: expected at least 1")
    if max_repeats is None:
        max_repeats = math.inf
    elif max_repeats < 1:
        raise ValueError(f"max_repeats {max_repeats}: expected at least 1")

    sizes = np.asarray(counts, np.float64)
    weights = sizes ** (1 / temperature)
    limits = max_repeats * sizes / sizes.sum()

    # A language that gains from the others' limits may in turn exceed its own limit: repeat until
    # all are within their limits.
    is_limited = np.zeros(len(sizes), bool)
    while True:
        rest = 1 - limits[is_limited].sum()
        shares = np.where(is_limited, limits, rest * weights / weights[~is_limited].sum())
        if not (shares > limits * (1 + 1e-12)).any():
            return Sampling(shares, is_limited)
        is_limited |= shares > limits


def limited_languages(
    languages: Sequence[manifest.Language], counts: Sequence[int], params: AnyParams
) -> list[str]:
    """Returns the codes of the languages that max_repeats limits, the smallest first.

    `counts` are the languages' numbers of examples; `params` are the input's, with its temperature
    and max_repeats.
    """
    is_limited = sampling(counts, params.temperature, params.max_repeats).is_limited
    smallest_first = np.argsort(counts, kind="stable")
    return [languages[i].code for i in smallest_first if is_limited[i]]


def warn_of_limits(
    languages: Sequence[manifest.Language], counts: Sequence[int], params: AnyParams
) -> None:
    """Logs the languages that a limit makes rarer than the temperature alone would.

    Takes the arguments of `limited_languages`.
    """
    limited = limited_languages(languages, counts, params)
    if limited:
        logging.warning(
            "max_repeats %g limits %d of %d languages, which temperature %g would repeat more "
            "often; the smallest: %s. None removes the limit.",
            params.max_repeats,
            len(limited),
            len(languages),
            params.temperature,
            ", ".join(limited[:_TOLD_LANGUAGES]),
        )


def languages_of(
    data: manifest.Manifest, split: str, codes: Sequence[str] | None
) -> tuple[manifest.Language, ...]:
    """Returns the languages with these codes; for None, all languages with examples in a split.

    Raises ValueError if the split is unknown, if a code is given twice or is not in the data, or if
    a language does not have examples in the split.
    """
    if split not in manifest.SPLITS:
        raise ValueError(f"split {split!r}: expected one of {', '.join(manifest.SPLITS)}")
    # Languages without examples in the split are left out, unless they were requested.
    if codes is None:
        codes = [language.code for language in data.languages if language.num_examples(split)]
    if len(set(codes)) < len(codes):
        raise ValueError(f"languages {tuple(codes)}: one is given twice")

    languages = tuple(data.language(code) for code in codes)
    if not languages:
        raise ValueError(f"no {data.group} has examples in split {split!r}")
    for language in languages:
        if not language.num_examples(split):
            raise ValueError(f"{data.group} {language.code} has no examples in split {split!r}")
    return languages


class Mixture(Generic[_Example]):
    """An endless stream of examples that can be read between any two positions.

    Up to position x, language l has given floor(p_l * x + phase_l) examples. So any part of the
    stream has the languages in their proportions, to within one example of each.
    """

    def __init__(self, source: Source[_Example], params: AnyParams) -> None:
        """With `shuffle`, each language gets a new order every time it starts over."""
        self._source = source
        self._shuffle = params.shuffle
        drawn = sampling(source.sizes, params.temperature, params.max_repeats)
        self._weights = drawn.probabilities

        rng = np.random.default_rng(params.seed)
        # Without phases all languages would give their first example at the same position.
        self._phases = rng.random(len(source.sizes))
        # Languages of equal size need different orders: their English sides may be the same.
        self._seeds = rng.integers(0, 2**32, len(source.sizes))

    def read(self, start: int, end: int) -> list[_Example]:
        """Returns the examples between two positions, in order: about end - start of them."""
        return self._source.read(self._records_between(start, end))

    def read_numbers(self, start: int, end: int) -> list[_Example]:
        """Returns examples number `start` to `end` of the stream: exactly end - start of them."""
        # Up to position x there are at most x + sum(phase_l) examples; at least, less than one per
        # language fewer. One more position keeps rounding away from the first example.
        total_phase = float(self._phases.sum())
        first_position = max(0.0, start - total_phase - 1)
        last_position = end - total_phase + len(self._phases) + 1

        num_before = int(self._given_before(first_position).sum())
        records = self._records_between(first_position, last_position)
        return self._source.read(records[start - num_before : end - num_before])

    def _records_between(self, start: float, end: float) -> np.ndarray:
        """Returns the records of the examples between two positions, in order, int64 [n]."""
        first = self._given_before(start)
        last = self._given_before(end)

        positions: list[np.ndarray] = []
        records: list[np.ndarray] = []
        num_records_before = 0  # The number of records of the languages before.
        for language, size in enumerate(self._source.sizes):
            numbers = np.arange(first[language], last[language])
            # Example k is at the position where floor(p_l * x + phase_l) becomes k + 1.
            positions.append((numbers + 1 - self._phases[language]) / self._weights[language])
            records.append(num_records_before + self._records(language, numbers))
            num_records_before += size

        order = np.argsort(np.concatenate(positions), kind="stable")
        return np.concatenate(records)[order]

    def _given_before(self, position: float) -> np.ndarray:
        """Returns how many examples each language gives before a position, int64 [languages]."""
        return np.floor(self._weights * position + self._phases).astype(np.int64)

    def _records(self, language: int, numbers: np.ndarray) -> np.ndarray:
        """Maps a language's example numbers, which continue over epochs, to its records."""
        size = self._source.sizes[language]
        epochs, indices = np.divmod(numbers, size)
        if not self._shuffle:
            return indices

        # Each epoch has its own permutation.
        records = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            seed = int(self._seeds[language] + epoch) % 2**32
            records[in_epoch] = shuffled(indices[in_epoch], size, seed)
        return records


def shuffled(indices: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Applies a random permutation of range(size) to int [n] indices."""
    if size <= _MAX_PERMUTED:
        return _permutation(size, seed)[indices]
    permuted = (_shuffled_index(int(index), size, seed) for index in indices)
    return np.fromiter(permuted, np.int64, len(indices))


def _shuffled_index(index: int, size: int, seed: int) -> int:
    """Applies a random permutation of range(size) to an index."""
    # For 4**k + 1 indices, Grain 0.2.18 maps two of them to the same one. If `size` is 2**k + 1,
    # and so may be such a number, permute one index more.
    last = size - 1
    if last & (last - 1) == 0:
        last = size

    # The result may be the extra index. Map it again: the permutation leads back into the range.
    while True:
        index = grain.experimental.index_shuffle(index, last, seed, _SHUFFLE_ROUNDS)
        if index < size:
            return index


@functools.lru_cache(maxsize=256)  # One entry for each language, at most 32 MiB in all.
def _permutation(size: int, seed: int) -> np.ndarray:
    # Indices below _MAX_PERMUTED fit into 16 bits.
    return np.random.default_rng(seed).permutation(size).astype(np.uint16)
