"""What the compiler made of a program: its collectives, memory and arithmetic."""

import collections
import dataclasses
from typing import Any

from lingvo_gshard.files import table
from lingvo_gshard.hlo import collectives, trip_counts
from lingvo_gshard.hlo.collectives import COLLECTIVES, Collective
from lingvo_gshard.hlo.hlo_module import Module


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """One partition's compiled program in numbers; a loop's body counts once."""

    name: str
    num_instructions: int  # Of all computations, fused ones included.
    flops: float  # By XLA's own count, like the next.
    accessed_bytes: float
    optimal_secs: float  # XLA's own roofline; 0 where a back end has none.
    argument_bytes: int  # Memory on each device, as are all bytes below.
    output_bytes: int
    alias_bytes: int  # How much of the output lies in donated arguments.
    temp_bytes: int
    peak_bytes: int  # The most that is held at once, arguments included.
    collective_ops: tuple[Collective, ...]  # Each and how often it runs, in the text's order.
    loops: dict[str, int | None]  # The most trips of each by name, None if unknown, in that order.

    @property
    def collectives(self) -> tuple[tuple[str, int], ...]:
        """The number of collectives of each kind, zero included, in the order of COLLECTIVES."""
        counts = collections.Counter(op.kind for op in self.collective_ops)
        return tuple((kind, counts[kind]) for kind in COLLECTIVES)

    def count(self, kind: str) -> int:
        """The number of collectives of one kind. Raises ValueError for an unknown kind."""
        if kind not in COLLECTIVES:
            raise ValueError(f"No collective {kind!r}; known are {', '.join(COLLECTIVES)}.")
        return dict(self.collectives)[kind]

    def table(self) -> str:
        """Tables of the figures, the collectives and the loops; equal collectives share a row."""
        rows = [("program", self.name), *((kind, n) for kind, n in self.collectives if n)]
        rows += [("instructions", self.num_instructions), ("gflop", f"{self.flops / 1e9:.3f}")]
        rows += [
            (f"{what} MiB", f"{getattr(self, what + '_bytes') / 2**20:.2f}")
            for what in ("accessed", "argument", "output", "alias", "temp")
        ]
        parts = [table.text(rows)]
        if self.collective_ops:
            ops: list[tuple] = [("collective", "count", "bytes", "times", "groups", "of size")]
            for op, count in collections.Counter(self.collective_ops).items():
                groups = len(op.groups), op.group_size
                ops.append((op.kind, count, op.result_bytes, op.times, *groups))
            parts.append(table.text(ops))
        if self.loops:
            trips = ((name, table.number(count, "d")) for name, count in self.loops.items())
            parts.append(table.text([("loop", "most trips"), *trips]))
        return "\n".join(parts)


def read(name: str, compiled: Any, module: Module) -> CompiledReport:
    """Reads a jax.stages.Compiled, whose program is `module`."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost or {}
    return CompiledReport(
        name=name,
        num_instructions=sum(len(each.instructions) for each in module.computations),
        flops=float(cost.get("flops", 0.0)),
        accessed_bytes=float(cost.get("bytes accessed", 0.0)),
        optimal_secs=float(cost.get("optimal_seconds", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        collective_ops=collectives.find(module),
        loops=trip_counts.count(module).trip_counts,
    )
