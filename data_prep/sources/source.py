"""What every source of parallel text is: rows of (language, pair), read as a stream."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Protocol

from data_prep import languages
from data_prep.tsv import Pair


@dataclasses.dataclass(frozen=True)
class Row:
    """A pair and the code of its source language."""

    language: str
    pair: Pair


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A line that holds no pair: its number, from 1, and what is wrong with it."""

    language: str
    number: int
    reason: str


class Source(Protocol):
    """One file, or what else is read as a whole; sources are read in parallel.

    `split` is train, dev or test; None deals the pairs out to the three by their English.
    """

    @property
    def split(self) -> str | None: ...

    @property
    def files(self) -> tuple[pathlib.Path, ...]:
        """The files that are read, as far as they are known before."""
        ...

    def rows(self) -> Iterator[Row | BadRow]:
        """Reads everything, in order. Raises ValueError: it cannot be read as what it should be."""
        ...


def matching_code(tag: str, wanted: tuple[str, ...] | None) -> str | None:
    """The language that text under `tag` counts as, None if it is not wanted or no language.

    A wanted code takes its own tag and, where no closer one is wanted, those of its regions: pt
    takes pt-BR. With `wanted` None every language counts, without its region. English never does.
    """
    if not languages.is_valid(tag) or is_english(tag):
        return None
    exact, primary = languages.code(tag), languages.primary(tag)
    if wanted is None:
        return primary
    return next((code for code in (exact, primary) if code in wanted), None)


def is_english(tag: str) -> bool:
    """Whether a tag is English, of whatever region."""
    return languages.is_valid(tag) and languages.primary(tag) == languages.ENGLISH
