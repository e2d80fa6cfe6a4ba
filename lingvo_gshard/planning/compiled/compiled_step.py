"""A compiled program as it is read: its report, the cost of each instruction, its collectives."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

from lingvo_gshard.hlo import hlo_cost, kernels
from lingvo_gshard.hlo.collectives import Collective, gathered_bytes
from lingvo_gshard.hlo.compiled_report import CompiledReport
from lingvo_gshard.hlo.hlo_cost import Cost
from lingvo_gshard.hlo.hlo_module import Module
from lingvo_gshard.planning.compiled.categories import source
from lingvo_gshard.planning.plan import CollectiveSum


class Compiled(Protocol):
    """All that the planner needs of a compiled program, whoever wrote it."""

    @property
    def module(self) -> Module:
        """The program of one partition."""
        ...

    def report(self) -> CompiledReport:
        """Returns the program's collectives, memory and operations."""
        ...


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled program in numbers, and the cost of each instruction."""

    report: CompiledReport
    costs: tuple[Cost, ...]
    gathered_bytes: dict[str, int]  # See collectives.gathered_bytes.
    uncounted_loops: tuple[str, ...] = ()  # The layers of loops of unknown length.
    uncounted_kernels: tuple[str, ...] = ()  # Kernels whose flops nobody gives; see kernels.py.


def read(compiled: Compiled, kernel_flops: Mapping[str, int] | None = None) -> CompiledStep:
    """Returns what a plan needs of a compiled program.

    `kernel_flops` are the flops of kernels by name, as kernels.parse_flops returns them. Raises
    ValueError for a name that no kernel of the program has.
    """
    module = compiled.module
    report = compiled.report()
    known_flops = kernel_flops or {}
    kernels.check_names(module, known_flops)
    return CompiledStep(
        report=report,
        costs=hlo_cost.costs(module, known_flops),
        gathered_bytes=gathered_bytes(module),
        uncounted_loops=_uncounted_loops(module, report),
        uncounted_kernels=kernels.uncounted(module, known_flops),
    )


def sum_by_source(collectives: Iterable[Collective]) -> tuple[CollectiveSum, ...]:
    """Returns one sum for each kind of collective and layer, the most bytes first."""
    # A collective in a loop counts as often as it runs.
    counts = collections.Counter[tuple[str, str]]()
    num_bytes = collections.Counter[tuple[str, str]]()
    for collective in collectives:
        key = collective.kind, source(collective.op_name)
        counts[key] += collective.times
        num_bytes[key] += collective.times * collective.result_bytes

    sums = [
        CollectiveSum(kind, counts[kind, layer], num_bytes[kind, layer], layer)
        for kind, layer in counts
    ]
    return tuple(sorted(sums, key=lambda collective_sum: -collective_sum.bytes))


def _uncounted_loops(module: Module, report: CompiledReport) -> tuple[str, ...]:
    """Returns the layers of loops whose length the compiler does not know, each once."""
    layers = []
    for instruction in module.instructions():
        # The report has every loop by its name, with None for an unknown length.
        is_loop = instruction.name in report.loops
        if is_loop and report.loops[instruction.name] is None:
            layers.append(source(instruction.op_name))
    return tuple(dict.fromkeys(layers))
