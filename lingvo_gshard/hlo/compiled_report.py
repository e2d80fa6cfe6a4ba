"""What the compiler made of a program: its collectives, memory and arithmetic."""

import collections
import dataclasses
from typing import Any

from lingvo_gshard.hlo import collectives, trip_counts
from lingvo_gshard.hlo.collectives import COLLECTIVES, Collective
from lingvo_gshard.hlo.hlo_module import Module
from lingvo_gshard.hlo.trip_counts import Loop


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """One partition's compiled program in numbers.

    A loop's body counts once, however often it runs; `times` of a collective says how often.

    Attributes:
      name: the program's name.
      collectives: (kind, count), all kinds of COLLECTIVES.
      num_instructions: of all computations, fused ones included.
      flops: floating-point operations by XLA's own count.
      accessed_bytes: read and written by its instructions, by XLA's own count.
      optimal_secs: XLA's own roofline; 0 where a back end has none.
      argument_bytes, output_bytes, temp_bytes: memory on each device.
      alias_bytes: how much of the output lies in donated arguments.
      peak_bytes: the most that is held at once, arguments included.
      collective_ops: each collective with its bytes and groups, in the text's order.
      loops: each loop with its trip count, in the text's order.
    """

    name: str
    collectives: tuple[tuple[str, int], ...]
    num_instructions: int
    flops: float
    accessed_bytes: float
    optimal_secs: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    collective_ops: tuple[Collective, ...]
    loops: tuple[Loop, ...]

    def count(self, kind: str) -> int:
        """The number of collectives of one kind; ValueError for an unknown kind."""
        counts = dict(self.collectives)
        if kind not in counts:
            raise ValueError(f"No collective {kind!r}; known are {', '.join(COLLECTIVES)}.")
        return counts[kind]

    def table(self) -> str:
        """The report as lines of `what  value`; then a line for each sort of collective, and loop.

        Kinds that do not occur are left out. Collectives are of one sort where kind, groups, times
        and bytes are equal.
        """
        rows = [("program", self.name), *((kind, n) for kind, n in self.collectives if n)]
        rows += [("instructions", self.num_instructions), ("gflop", f"{self.flops / 1e9:.3f}")]
        rows += [
            (f"{what} MiB", f"{getattr(self, what + '_bytes') / 2**20:.2f}")
            for what in ("accessed", "argument", "output", "alias", "temp")
        ]
        lines = [f"{what:<20} {value:>16}" for what, value in rows]
        if self.collective_ops:
            lines.append(_row("collective", "count", "bytes", "times", "groups", "of size"))
        for op, count in collections.Counter(self.collective_ops).items():
            times = _known(op.times)
            lines.append(
                _row(op.kind, count, op.result_bytes, times, len(op.groups), op.group_size)
            )
        lines += [f"loop {loop.name}: {_known(loop.trip_count)} trips" for loop in self.loops]
        return "\n".join(lines)


def read(name: str, compiled: Any, module: Module) -> CompiledReport:
    """Reads a jax.stages.Compiled, whose program is `module`."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost or {}
    runs = trip_counts.count(module)
    found = collectives.find(module, runs.times)
    counts = collections.Counter(op.kind for op in found)
    return CompiledReport(
        name=name,
        collectives=tuple((kind, counts[kind]) for kind in COLLECTIVES),
        num_instructions=sum(len(each.instructions) for each in module.computations),
        flops=float(cost.get("flops", 0.0)),
        accessed_bytes=float(cost.get("bytes accessed", 0.0)),
        optimal_secs=float(cost.get("optimal_seconds", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        collective_ops=found,
        loops=runs.loops,
    )


def _row(*cells: Any) -> str:
    return f"{cells[0]:<20}" + "".join(f" {cell:>12}" for cell in cells[1:])


def _known(number: int | None) -> str:
    return "unknown" if number is None else str(number)
