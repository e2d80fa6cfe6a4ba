"""The share of pairs that are too long for a row: training leaves them out, evaluation cuts them.

The share is computed from the files of lengths. If a corpus has very many files, only some of each
language's are read.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core.hyperparams import AnyParams
from lingvo_gshard.input import manifest
from lingvo_gshard.input.packing import RowShape
from lingvo_gshard.input.records import read_lengths

_MAX_FILES = 1024  # Each file has 64 kB, if it has data_prep's default size.
_TOLD_LANGUAGES = 5  # The most languages that a message names.
_SMALL_SHARE = 0.001  # Below it, one decimal of a percentage could be 0.0.


@dataclasses.dataclass(frozen=True)
class TooLong:
    """The shares of a split's pairs that are too long for a row on at least one side."""

    shares: Mapping[str, float]  # By language.
    num_pairs: Mapping[str, int]
    is_estimated: bool  # Whether some files were not read.

    @property
    def share(self) -> float:
        """The share of all pairs."""
        num_too_long = sum(self.shares[code] * number for code, number in self.num_pairs.items())
        return num_too_long / sum(self.num_pairs.values())

    def __str__(self) -> str:
        about = "about " if self.is_estimated else ""
        worst_first = sorted(self.shares, key=lambda code: -self.shares[code])
        languages = []
        for code in worst_first[:_TOLD_LANGUAGES]:
            if self.shares[code] > 0:
                languages.append(f"{code} {_percent(self.shares[code])}")
        return f"{about}{_percent(self.share)} of the pairs ({', '.join(languages)})"


def _percent(share: float) -> str:
    """Returns a share above 0 as a percentage that is not rounded to 0."""
    return f"{share:.1%}" if share >= _SMALL_SHARE else f"{100 * share:.1g}%"


def too_long(p: AnyParams, languages: Sequence[manifest.Language]) -> TooLong:
    """Returns the shares of pairs that are too long for a row, for a TranslationInput's settings.

    Raises ValueError if a file of lengths is missing or damaged.
    """
    shape = RowShape(p.source_len, p.target_len)
    most_files = max(1, _MAX_FILES // len(languages))

    shares: dict[str, float] = {}
    num_pairs: dict[str, int] = {}
    is_estimated = False
    for language in languages:
        shards = language.records[p.split].shards
        if len(shards) > most_files:
            # Choose some files, spread evenly over the language.
            chosen = np.linspace(0, len(shards) - 1, most_files).astype(int)
            shards = tuple(shards[i] for i in chosen)
            is_estimated = True

        lengths = read_lengths(p.data_dir, shards)
        fits = (lengths <= [shape.source_len, shape.target_len]).all(axis=1)
        shares[language.code] = float(1 - fits.mean())
        num_pairs[language.code] = language.num_examples(p.split)
    return TooLong(shares, num_pairs, is_estimated)


def check(p: AnyParams, languages: Sequence[manifest.Language]) -> None:
    """Warns about training pairs that are left out, and about other pairs that are cut.

    Raises ValueError if the share of training pairs that are left out exceeds max_too_long_share,
    or if a file of lengths is missing or damaged.
    """
    long_pairs = too_long(p, languages)
    rows = f"source_len {p.source_len} and target_len {p.target_len}"
    if p.repeat and long_pairs.share > p.max_too_long_share:
        raise ValueError(
            f"split {p.split}: {long_pairs} are longer than rows of {rows}, and would never be "
            "trained on: lengthen the rows, or raise max_too_long_share from "
            f"{p.max_too_long_share:g}"
        )
    if long_pairs.share > 0:
        fate = "are never trained on" if p.repeat else "are cut"
        _warn_once(f"split {p.split}: {long_pairs} are longer than rows of {rows}, and {fate}.")


@functools.cache  # Evaluation opens its input repeatedly.
def _warn_once(message: str) -> None:
    logging.warning(message)
