"""What the compiler made of a program: its collectives, memory and arithmetic."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

COLLECTIVES = ("all-to-all", "all-reduce", "all-gather", "collective-permute", "reduce-scatter")
# A -start and its -done are one collective; the start is counted.
_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """One partition's compiled program in numbers.

    A loop's body counts once, however often it runs.

    Attributes:
      name: the program's name.
      collectives: (kind, count), all kinds of COLLECTIVES.
      num_instructions: of all computations, fused ones included.
      flops: floating-point operations by XLA's own count.
      argument_bytes, output_bytes, temp_bytes: memory on each device.
      alias_bytes: how much of the output lies in donated arguments.
    """

    name: str
    collectives: tuple[tuple[str, int], ...]
    num_instructions: int
    flops: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    def count(self, kind: str) -> int:
        """The number of collectives of one kind; ValueError for an unknown kind."""
        counts = dict(self.collectives)
        if kind not in counts:
            raise ValueError(f"No collective {kind!r}; known are {', '.join(COLLECTIVES)}.")
        return counts[kind]

    def table(self) -> str:
        """The report as lines of `what  value`."""
        rows = [("program", self.name), *self.collectives]
        rows += [("instructions", self.num_instructions), ("gflop", f"{self.flops / 1e9:.3f}")]
        rows += [
            (f"{what} MiB", f"{getattr(self, what + '_bytes') / 2**20:.2f}")
            for what in ("argument", "output", "alias", "temp")
        ]
        return "\n".join(f"{what:<20} {value:>16}" for what, value in rows)


def count_collectives(text: str) -> tuple[tuple[str, int], ...]:
    """(kind, count) of every kind in a compiled program's text."""
    counts = collections.Counter(_COLLECTIVE.findall(text))
    return tuple((kind, counts[kind]) for kind in COLLECTIVES)


def read(name: str, compiled: Any) -> CompiledReport:
    """Reads a jax.stages.Compiled."""
    text, memory, cost = compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost or {}
    return CompiledReport(
        name=name,
        collectives=count_collectives(text),
        num_instructions=len(_INSTRUCTION.findall(text)),
        flops=float(cost.get("flops", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )
