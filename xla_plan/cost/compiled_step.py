"""The planner's reading of a compiled program: report, instructions' costs, collectives."""

import collections
import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Protocol, Self, TypeVar

from xla_plan.cost.scopes import source
from xla_plan.cost.step_cost import CollectiveSum
from xla_spmd.hlo import data_dependence, hlo_cost, kernels, products
from xla_spmd.hlo.collectives import Collective, gathered_bytes
from xla_spmd.hlo.compiled_report import CompiledReport
from xla_spmd.hlo.hlo_cost import Cost
from xla_spmd.hlo.hlo_module import Module

_Counted = TypeVar("_Counted", Cost, Collective)


class Compiled(Protocol):
    """The interface of a compiled program that the planner needs, whoever wrote the program."""

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
    # Kernels and other custom calls of unknown flops; see products.uncounted.
    uncounted_kernels: tuple[str, ...] = ()
    # Operations that the data decide, with the layer: conditionals, loops that may end early,
    # ragged work.
    by_data: tuple[str, ...] = ()

    def at_least(self) -> Self:
        """Returns the same program with the runs of a call whose data need the least work."""
        costs = [_at_least(cost) for cost in self.costs]
        ops = tuple(_at_least(op) for op in self.report.collective_ops)
        report = dataclasses.replace(self.report, collective_ops=ops)
        return dataclasses.replace(self, report=report, costs=tuple(costs), by_data=())


def read(compiled: Compiled, kernel_flops: Mapping[str, int] | None = None) -> CompiledStep:
    """Reads the part of a compiled program that a plan needs.

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
        uncounted_kernels=products.uncounted(module, known_flops),
        by_data=_by_data(module),
    )


def _at_least(counted: _Counted) -> _Counted:
    """Returns a cost or a collective with its least possible number of runs."""
    if counted.least_times is None:
        return counted
    return dataclasses.replace(counted, times=counted.least_times)


def _by_data(module: Module) -> tuple[str, ...]:
    """Returns the operations that the data decide, each once per layer and kind."""
    by_data = data_dependence.runs(module).most.by_data
    described = []
    for instruction in module.instructions():
        if products.is_ragged(instruction):
            described.append(f"ragged work in {source(instruction.op_name)}")
        elif instruction.name in by_data:
            kind = "loop" if instruction.opcode == "while" else "conditional"
            described.append(f"{kind} in {source(instruction.op_name)}")
    return tuple(dict.fromkeys(described))


def sum_by_source(
    collectives: Iterable[Collective], lines: Mapping[str, str] = types.MappingProxyType({})
) -> tuple[CollectiveSum, ...]:
    """Returns one sum for each kind of collective, layer and line, the most bytes first.

    `lines` are the users' lines by op_name, where they are known.
    """
    # A collective in a loop counts as often as it runs.
    counts = collections.Counter[tuple[str, str, str | None]]()
    num_bytes = collections.Counter[tuple[str, str, str | None]]()
    for collective in collectives:
        op_name = collective.op_name
        key = collective.kind, source(op_name), lines.get(op_name)
        counts[key] += collective.times
        num_bytes[key] += collective.times * collective.result_bytes

    sums = []
    for key, size in num_bytes.most_common():
        kind, layer, line = key
        sums.append(CollectiveSum(kind, counts[key], size, layer, line))
    return tuple(sums)


def _uncounted_loops(module: Module, report: CompiledReport) -> tuple[str, ...]:
    """Returns the layers of loops whose length the compiler does not know, each once."""
    layers = []
    for instruction in module.instructions():
        # The report lists every loop under its name, with None for an unknown length.
        is_loop = instruction.name in report.loops
        if is_loop and report.loops[instruction.name] is None:
            layers.append(source(instruction.op_name))
    return tuple(dict.fromkeys(layers))
