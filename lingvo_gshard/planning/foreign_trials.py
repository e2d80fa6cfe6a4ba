"""Trials of a search over a foreign program's splits: tables that the compiler has seen."""

import dataclasses
import math
from collections.abc import Sequence

from lingvo_gshard.hlo.hlo_module import num_bytes
from lingvo_gshard.planning import any_program
from lingvo_gshard.planning.argument_letters import Letters
from lingvo_gshard.planning.estimate import foreign_cost, hardware
from lingvo_gshard.planning.estimate.foreign_cost import Rows, Split
from lingvo_gshard.planning.estimate.foreign_tables import Table
from lingvo_gshard.planning.program_plan import AnyPlan
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import reannotated
from lingvo_gshard.spmd.dims.dim_sets import Dims
from lingvo_gshard.spmd.foreign import ForeignProgram

_SAME_SHARE = 0.05  # Tables that split less than this share of the bytes otherwise are alike.


@dataclasses.dataclass(frozen=True)
class Trial:
    """A table that was compiled, with its plan or the compiler's reason why there is none."""

    table: Table
    splits: dict[str, Split]  # Of the arguments, by their names.
    plan: AnyPlan | None
    refusal: str = ""

    @property
    def step_secs(self) -> float:
        """The time of a call at the roofline; infinite if it cannot run."""
        return step_secs(self.plan)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What a search has found, the fastest trial first."""

    program: ForeignProgram
    topology: str
    letters: Letters
    num_tables: int
    given: AnyPlan  # Of the program as it was given; replicated if it said nothing.
    is_replicated: bool  # Whether it said nothing.
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The fastest table, if one is faster than what was given or fits where that does not."""
        if not self.trials or self.trials[0].step_secs >= step_secs(self.given):
            return None
        return self.trials[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is searched for."""

    program: ForeignProgram
    letters: Letters
    topology: str
    roles: Sequence[str]
    categories: Sequence[str]

    @property
    def capacity_gib(self) -> float:
        """The memory of a device."""
        return hardware.generation(self.topology).capacity_gib


def step_secs(plan: AnyPlan | None) -> float:
    """Returns the time of a call of a plan at the roofline; infinite if it cannot run."""
    return plan.cost.step_secs if plan and plan.cost else math.inf


def compile_table(task: Task, chosen: Table) -> Trial:
    """Returns the trial of a table: its plan, or the first line of the compiler's refusal."""
    splits = {}
    for argument, names in zip(task.program.arguments, task.letters.arguments, strict=True):
        splits[argument.name] = foreign_cost.split(names, chosen.rows)
    program = partitioned(task.program, task.letters, chosen.mesh, chosen.rows)
    try:
        plan = any_program.make(program, task.topology, None, task.roles, task.categories)
    except ValueError as error:
        return Trial(chosen, splits, None, str(error).splitlines()[0])
    return Trial(chosen, splits, plan)


def partitioned(
    program: ForeignProgram, letters: Letters, mesh: Mesh, rows: Rows
) -> ForeignProgram:
    """Returns a program whose arguments, results and constraints are split by a table."""
    reading = letters.reading
    arguments = [foreign_cost.split(names, rows) for names in letters.arguments]

    # What is no argument may have another size than its letter has there.
    def inner_split(dims: Dims) -> Split:
        axes_of_dims = foreign_cost.split(letters.of(dims), rows)
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
    """Returns whether two tables of a mesh split nearly all bytes of the arguments alike."""
    if a.mesh != b.mesh:
        return False
    differing = 0
    total = 0
    for argument, names in zip(task.program.arguments, task.letters.arguments, strict=True):
        size = num_bytes([argument.array])
        total += size
        if foreign_cost.split(names, a.rows) != foreign_cost.split(names, b.rows):
            if not argument.is_donated and task.letters.batch in names:
                return False  # The batch is small, and all work follows it.
            differing += size
    return differing < _SAME_SHARE * total
