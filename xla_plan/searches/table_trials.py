"""Trials of a search over a program's splits: compiled tables."""

import dataclasses
from collections.abc import Sequence

from xla_plan.machines import hardware
from xla_plan.plans import programs
from xla_plan.plans.programs import Options
from xla_plan.program import reannotated
from xla_plan.program.argument_letters import Letters
from xla_plan.program.dims.dim_sets import Dims
from xla_plan.program.stablehlo_program import StablehloProgram
from xla_plan.searches import table_cost
from xla_plan.searches.table_cost import Rows, Split
from xla_plan.searches.tables import Table
from xla_plan.searches.trials import Trial
from xla_spmd.hlo.hlo_module import num_bytes
from xla_spmd.mesh import Mesh

_SAME_SHARE = 0.05  # Tables that differ in less than this share of the bytes are alike.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableTrial(Trial):
    """A trial of a table."""

    table: Table
    splits: dict[str, Split]  # The split of each argument, by its name.


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The results of a search, the fastest trial first."""

    program: StablehloProgram
    topology: str
    letters: Letters
    num_tables: int
    given: Trial  # The given program; replicated if it lacks shardings.
    is_replicated: bool
    trials: tuple[TableTrial, ...]

    @property
    def best(self) -> TableTrial | None:
        """The fastest table; None if it is not faster than the given program."""
        if not self.trials or self.trials[0].secs.step >= self.given.secs.step:
            return None
        return self.trials[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A program to search tables for."""

    program: StablehloProgram
    letters: Letters
    topology: str
    options: Options

    @property
    def capacity_gib(self) -> float:
        """The memory of a device."""
        return hardware.generation(self.topology).capacity_gib


def compile_table(task: Task, chosen: Table) -> TableTrial:
    """Returns the trial of a table: its plan, or the first line of the compiler's refusal."""
    splits = {}
    for argument, names in zip(task.program.arguments, task.letters.arguments, strict=True):
        splits[argument.name] = table_cost.split(names, chosen.rows)
    program = partitioned(task.program, task.letters, chosen.mesh, chosen.rows)
    plan = None
    refusal = ""
    try:
        plan = programs.make(program, task.topology, task.options)
    except ValueError as error:
        refusal = str(error).splitlines()[0]
    return TableTrial(
        name=chosen.name,
        plan=plan,
        refusal=refusal,
        estimated_secs=chosen.secs,
        table=chosen,
        splits=splits,
    )


def partitioned(
    program: StablehloProgram, letters: Letters, mesh: Mesh, rows: Rows
) -> StablehloProgram:
    """Returns a program whose arguments, results and constraints are split by a table."""
    reading = letters.reading
    arguments = [table_cost.split(names, rows) for names in letters.arguments]

    # Inner tensors can differ in size from the arguments' dims with the same letter.
    def inner_split(dims: Dims) -> Split:
        axes_of_dims = table_cost.split(letters.of(dims), rows)
        split = []
        for dim, axes in zip(dims, axes_of_dims, strict=True):
            is_divided = reading.sets.sizes[dim] % mesh.size(axes) == 0
            split.append(axes if is_divided else ())
        return tuple(split)

    return reannotated.reannotated(
        program,
        mesh,
        arguments,
        list(map(inner_split, reading.results)),
        list(map(inner_split, reading.constraints)),
    )


def are_alike(task: Task, a: Table, b: Table) -> bool:
    """Returns whether two tables split nearly all bytes of the arguments alike.

    Tables of two meshes are alike only if each device has the same parts: an axis of 8 splits a dim
    like two axes of 2 and 4.
    """
    if a.mesh != b.mesh:
        letters = task.letters
        tensors = [*letters.arguments, *map(letters.of, letters.reading.constraints)]
        return all(_placed(names, a) == _placed(names, b) for names in tensors)

    differing = 0
    total = 0
    for argument, names in zip(task.program.arguments, task.letters.arguments, strict=True):
        size = num_bytes([argument.array])
        total += size
        if table_cost.split(names, a.rows) != table_cost.split(names, b.rows):
            if not argument.is_donated and task.letters.batch in names:
                return False  # The batch is small, and all work follows it.
            differing += size
    return differing < _SAME_SHARE * total


def _placed(letters: Sequence[str], table: Table) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns how devices split each dim: the factors of their numbers, as (size, stride).

    Devices 0, 1, 2, ... are placed along the last axis of a mesh first. Consecutive axes merge.
    """
    strides = {}
    stride = 1
    for name, size in reversed(table.mesh.shape.items()):
        strides[name] = stride
        stride *= size

    placed = []
    for axes in table_cost.split(letters, table.rows):
        factors: list[tuple[int, int]] = []
        for axis in axes:
            size = table.mesh.shape[axis]
            if factors and factors[-1][1] == size * strides[axis]:
                size *= factors.pop()[0]
            if size > 1:
                factors.append((size, strides[axis]))
        placed.append(tuple(factors))
    return tuple(placed)
