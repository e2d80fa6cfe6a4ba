"""How lines of text end: by the model, cut at the maximum length, or without any result."""

import dataclasses
import enum
import logging
import math
from collections.abc import Iterable

# If EOS at the maximum length is less probable, the model would rather have continued.
MIN_END_LOG_PROB = math.log(0.5)


class Finish(enum.StrEnum):
    """Why a text ends.

    STOP: the model ended it. LENGTH: it was cut at the maximum length, decode.max_target_len
    tokens, where the model would more likely have continued.
    """

    STOP = "stop"
    LENGTH = "length"


def finish_of(finishes: Iterable[Finish]) -> Finish:
    """Returns why a text of several parts ends: LENGTH if any of them was cut."""
    return Finish.LENGTH if Finish.LENGTH in set(finishes) else Finish.STOP


class NoResultError(ValueError):
    """The error for a line without a result: the model's numbers for it are not finite."""

    def __init__(self, place: str, noun: str, number: int = 0) -> None:
        """`place` names the line; `number`, from 1, is its number in its text."""
        super().__init__(f"{place} {no_result(noun)}")
        self.number = number


def no_result(noun: str) -> str:
    """Returns the reason that an error gives after the name of a line; `noun` names the result."""
    return f"has no {noun}: the model's numbers for it are not finite (NaN or infinite)."


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of output."""

    text: str  # Without the line's end.
    finish: Finish


@dataclasses.dataclass
class CutLines:
    """Counts the lines whose texts were cut, for one warning about all of them."""

    num_lines: int = 0
    num_cut: int = 0
    first: str = ""  # The place of the first cut line.

    def count(self, place: str, finish: Finish) -> None:
        """Counts a line, which `place` names."""
        self.num_lines += 1
        if finish is Finish.LENGTH:
            self.num_cut += 1
            self.first = self.first or place

    def warn(self) -> None:
        """Warns about the lines that were cut; silent if all lines are whole."""
        if self.num_cut > 0:
            logging.warning(
                "%d of %d lines were cut at the maximum length, decode.max_target_len; the first "
                "is %s. --max_target_len changes it, with --logdir.",
                self.num_cut,
                self.num_lines,
                self.first,
            )
