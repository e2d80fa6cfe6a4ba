"""The table of repro/propagation.py: a program's numbers with both propagators, side by side."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from repro.propagation_programs import GSPMD, SHARDY

# XLA's other two kinds do not occur in programs that XLA itself has partitioned.
KINDS = ("all-to-all", "all-reduce", "all-gather", "collective-permute", "reduce-scatter")
HEADER = (
    "program",
    "machine",
    *KINDS,
    "instructions",
    "temporary MiB",
    "CPU s to compile",
    "results",
)
_MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The numbers of a compiled program, or the reason why its compilation failed."""

    key: str  # The program, the machine and the propagator; see Case.key.
    failure: str  # Why the propagator failed, in one line; "" if it compiled the program.
    falls_back: bool  # Whether XLA falls back to GSPMD, according to its log.
    # Kind -> (the number of them in a call, the bytes of their results on one device).
    collectives: dict[str, tuple[int, ...]]
    instructions: int
    temp_bytes: int
    compile_secs: float  # CPU time.
    # The program's results on the CPU: losses, metrics or scores, and tokens.
    numbers: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def sent_bytes(self) -> int:
        """The bytes of the results of all collectives in a call, on one device."""
        return sum(num_bytes for _, num_bytes in self.collectives.values())


@dataclasses.dataclass(frozen=True)
class Row:
    """A program on a machine, compiled by both propagators."""

    program: str
    machine: str
    gspmd: Compiled
    shardy: Compiled

    @property
    def is_complete(self) -> bool:
        """Whether both propagators have compiled the program."""
        return not self.gspmd.failure and not self.shardy.failure

    def cells(self) -> tuple[str, ...]:
        """Returns the row as text, in the order of HEADER."""
        compiled = [each for each in (self.gspmd, self.shardy) if not each.failure]
        collectives = []
        for kind in KINDS:
            collectives.append(_both([_runs(each, kind) for each in compiled]))

        return (
            self.program,
            self.machine,
            *collectives,
            _both([str(each.instructions) for each in compiled]),
            _both([f"{each.temp_bytes / _MIB:.2f}" for each in compiled]),
            _both([f"{each.compile_secs:.1f}" for each in compiled]),
            self._results(),
        )

    def _results(self) -> str:
        """Returns the difference of the results, or the propagators that failed."""
        failures = []
        for name, compiled in ((GSPMD, self.gspmd), (SHARDY, self.shardy)):
            if compiled.failure:
                failures.append(f"{name} {compiled.failure}")
        if failures:
            return "; ".join(failures)
        if not self.gspmd.numbers:
            return "not run"

        difference = largest_difference(self.gspmd.numbers, self.shardy.numbers)
        differing = np.count_nonzero(np.array(self.gspmd.tokens) != np.array(self.shardy.tokens))
        if difference == 0 and differing == 0:
            return "bit-equal"
        tokens = f", {differing} of {len(self.gspmd.tokens)} tokens" if differing else ""
        return f"{difference:.1e}{tokens}"


def largest_difference(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Returns the largest relative difference of two sequences.

    It is infinite for unequal lengths. Equal infinities do not differ, and neither do two NaNs.
    """
    if len(expected) != len(actual):
        return math.inf
    largest = 0.0
    for a, b in zip(expected, actual, strict=True):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        difference = abs(a - b) / max(abs(a), abs(b))
        largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def summary(rows: Sequence[Row]) -> str:
    """Returns a summary of the table in a few lines."""
    # The failures of each propagator, and the programs for which XLA fell back.
    complete = [row for row in rows if row.is_complete]
    ran = [row for row in complete if row.gspmd.numbers]
    equal = sum(row.cells()[-1] == "bit-equal" for row in ran)
    failed = {
        GSPMD: sum(bool(row.gspmd.failure) for row in rows),
        SHARDY: sum(bool(row.shardy.failure) for row in rows),
    }
    fallbacks = {
        GSPMD: sum(row.gspmd.falls_back for row in rows),
        SHARDY: sum(row.shardy.falls_back for row in rows),
    }
    lines = [
        f"{len(rows)} rows, of which {GSPMD} did not compile {failed[GSPMD]} and {SHARDY} did not "
        f"compile {failed[SHARDY]}.",
        f"XLA's log says that it falls back to GSPMD: {fallbacks[GSPMD]} programs with GSPMD's "
        f"annotations, {fallbacks[SHARDY]} with Shardy's.",
        f"Of {len(ran)} programs that ran, {equal} have bit-equal results.",
    ]

    # The differences of the programs that both propagators have compiled.
    for what, field in (
        ("Bytes of collectives", "sent_bytes"),
        ("Instructions", "instructions"),
        ("Temporary memory", "temp_bytes"),
    ):
        pairs = [(getattr(row.gspmd, field), getattr(row.shardy, field)) for row in complete]
        fewer = sum(shardy < gspmd for gspmd, shardy in pairs)
        more = sum(shardy > gspmd for gspmd, shardy in pairs)
        lines.append(f"{what}, by Shardy: less in {fewer} rows, more in {more}.")
    if complete:
        ratios = [row.shardy.compile_secs / row.gspmd.compile_secs for row in complete]
        lines.append(
            f"CPU time to compile, Shardy's over GSPMD's: {np.median(ratios):.2f} in the median, "
            f"{min(ratios):.2f} to {max(ratios):.2f}."
        )
    return "\n".join(lines)


def _runs(compiled: Compiled, kind: str) -> str:
    """Returns the number of collectives of a kind in a call, and the MiB of their results."""
    runs, num_bytes = compiled.collectives.get(kind, (0, 0))
    return f"{runs}: {num_bytes / _MIB:.2f}" if runs else "-"


def _both(cells: Sequence[str]) -> str:
    """Returns GSPMD's and Shardy's cells, or one cell if they are equal or one is missing."""
    return " -> ".join(dict.fromkeys(cells)) or "-"
