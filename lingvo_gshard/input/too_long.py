"""How many pairs are longer than a row: training leaves them out, and evaluation cuts them.

The files of lengths tell it. If a corpus has very many files, some of each language's are read.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core import hyperparams
from lingvo_gshard.input import manifest
from lingvo_gshard.input.packing import RowShape
from lingvo_gshard.input.records import read_lengths

_MAX_FILES = 1024  # Each has 64 kB, if it is as large as data_prep makes it by default.
_TOLD_LANGUAGES = 5  # In a message.


@dataclasses.dataclass(frozen=True)
class TooLong:
    """The shares of a split's pairs that are longer than a row on one of their sides."""

    shares: Mapping[str, float]  # By language.
    num_pairs: Mapping[str, int]
    is_estimated: bool  # Whether not all files were read.

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
                languages.append(f"{code} {self.shares[code]:.1%}")
        return f"{about}{self.share:.1%} of the pairs ({', '.join(languages)})"


def too_long(p: hyperparams.Params, languages: Sequence[manifest.Language]) -> TooLong:
    """Returns how many pairs of the split of a TranslationInput's settings no row holds.

    Raises ValueError as `read_lengths`.
    """
    shape = RowShape(p.source_len, p.target_len)
    most_files = max(1, _MAX_FILES // len(languages))

    shares: dict[str, float] = {}
    num_pairs: dict[str, int] = {}
    is_estimated = False
    for language in languages:
        shards = language.records[p.split].shards
        if len(shards) > most_files:
            # Some from all over the language.
            chosen = np.linspace(0, len(shards) - 1, most_files).astype(int)
            shards = tuple(shards[i] for i in chosen)
            is_estimated = True

        lengths = read_lengths(p.data_dir, shards)
        fits = (lengths <= [shape.source_len, shape.target_len]).all(axis=1)
        shares[language.code] = float(1 - fits.mean())
        num_pairs[language.code] = language.num_examples(p.split)
    return TooLong(shares, num_pairs, is_estimated)


def check(p: hyperparams.Params, languages: Sequence[manifest.Language]) -> None:
    """Warns of training pairs that are left out, and of others that are cut.

    Raises ValueError if more training pairs are left out than max_too_long_share, and as
    `too_long`.
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


@functools.cache  # Evaluation opens its input again and again.
def _warn_once(message: str) -> None:
    logging.warning(message)
