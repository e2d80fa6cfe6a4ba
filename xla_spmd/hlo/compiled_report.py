"""A report on a compiled program: its collectives, memory and arithmetic."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from xla_spmd.files import table
from xla_spmd.hlo import collectives, data_dependence
from xla_spmd.hlo.collectives import Collective
from xla_spmd.hlo.hlo_module import COLLECTIVES, Module


@dataclasses.dataclass(frozen=True)
class CompiledReport:
    """One partition's compiled program in numbers. A loop's body counts once."""

    name: str
    num_instructions: int  # Including instructions inside fusions.
    flops: float  # XLA's own count, as is accessed_bytes.
    accessed_bytes: float
    optimal_secs: float  # XLA's own roofline model; 0 if the back end lacks one.
    argument_bytes: int  # All bytes below are memory on each device.
    output_bytes: int
    alias_bytes: int  # The part of the output stored in donated arguments.
    temp_bytes: int
    # The most memory in use at once, arguments included.
    peak_bytes: int
    collective_ops: tuple[Collective, ...]  # In the order of the program's computations.
    # The most trips of each loop, by name, or None if unknown. Outer loops come first.
    loops: dict[str, int | None]

    @property
    def collectives(self) -> tuple[tuple[str, int], ...]:
        """The number of collectives of each kind, zero included, in the order of COLLECTIVES."""
        counts = collections.Counter(op.kind for op in self.collective_ops)
        return tuple((kind, counts[kind]) for kind in COLLECTIVES)

    def count(self, kind: str) -> int:
        """Returns the number of collectives of one kind.

        Raises ValueError for an unknown kind.
        """
        if kind not in COLLECTIVES:
            raise ValueError(f"No collective {kind!r}; known are {', '.join(COLLECTIVES)}.")
        return dict(self.collectives)[kind]

    def table(self) -> str:
        """Returns the figures, the collectives and the loops as tables of text.

        Collectives that are equal in every column share a row.
        """
        return "\n".join(table.text(rows) for rows in self._tables())

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return "\n".join(table.as_html(rows) for rows in self._tables())

    def _tables(self) -> list[Sequence[Sequence[object]]]:
        tables: list[Sequence[Sequence[object]]] = [self._figures()]
        if self.collective_ops:
            tables.append(self._collective_rows())
        if self.loops:
            tables.append(self._loop_rows())
        return tables

    def _figures(self) -> list[tuple[str, object]]:
        present = [(kind, count) for kind, count in self.collectives if count]
        return [
            ("program", self.name),
            *present,
            ("instructions", self.num_instructions),
            ("gflop", f"{self.flops / 1e9:.3f}"),
            ("accessed MiB", _mebibytes(self.accessed_bytes)),
            ("argument MiB", _mebibytes(self.argument_bytes)),
            ("output MiB", _mebibytes(self.output_bytes)),
            ("alias MiB", _mebibytes(self.alias_bytes)),
            ("temp MiB", _mebibytes(self.temp_bytes)),
        ]

    def _collective_rows(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = [
            ("collective", "count", "bytes", "times", "groups", "of size")
        ]
        for op, count in collections.Counter(self.collective_ops).items():
            rows.append((op.kind, count, op.result_bytes, op.times, len(op.groups), op.group_size))
        return rows

    def _loop_rows(self) -> list[tuple[str, str]]:
        trips = [(name, table.number(count, "d")) for name, count in self.loops.items()]
        return [("loop", "most trips"), *trips]


def read(name: str, compiled: Any, module: Module) -> CompiledReport:
    """Returns the report of a jax.stages.Compiled, whose program is `module`."""
    memory = compiled.memory_analysis()

    # Some back ends return a list with one dict, and others a dict or None.
    cost = compiled.cost_analysis()
    if isinstance(cost, list):
        cost = cost[0]
    cost = cost or {}

    return CompiledReport(
        name=name,
        num_instructions=sum(1 for _ in module.instructions()),
        flops=float(cost.get("flops", 0.0)),
        accessed_bytes=float(cost.get("bytes accessed", 0.0)),
        # The TPU's compiler gives negative times, which are meaningless, for some large programs.
        optimal_secs=max(0.0, float(cost.get("optimal_seconds", 0.0))),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=_peak_bytes(memory),
        collective_ops=collectives.find(module),
        loops=data_dependence.runs(module).most.trip_counts,
    )


def _peak_bytes(memory: Any) -> int:
    """Returns the most memory of a device in use at once, given JAX's CompiledMemoryStats.

    XLA's peak also counts tensors in the host's memory. Without them, it is at most the sum of the
    device's parts, which is an upper bound: temporaries may reuse the memory of arguments.
    """
    peak_bytes = memory.peak_memory_in_bytes
    host_bytes = (
        memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        + memory.host_temp_size_in_bytes
    )
    if not host_bytes:
        return peak_bytes

    device_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return min(peak_bytes, device_bytes)


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f}"
