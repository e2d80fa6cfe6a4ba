"""Searches for better splits of a foreign program's arguments: `plan --program=FILE --search`.

from lingvo_gshard import planning

found = planning.search(step, (state, batch), "v5e:4x4", letters=[".*mlp/wi=M H"])
print(planning.search_text(found))

The program's arguments get letters (argument_letters.py), and all small meshes and tables from the
letters to their axes are ranked by an estimate (estimate/foreign_tables.py, foreign_cost.py). The
best few are compiled and planned (foreign_trials.py), beside the program as it was given. Only the
annotations are changed: those of the arguments, of the results that lie in their memory, and of the
program's own constraints, which follow by their letters. XLA propagates the rest.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.files import atomic_file
from lingvo_gshard.planning import (
    any_program,
    argument_letters,
    foreign_search_text,
    foreign_trials,
)
from lingvo_gshard.planning.estimate import foreign_tables
from lingvo_gshard.planning.estimate.foreign_cost import ForeignCost
from lingvo_gshard.planning.estimate.foreign_tables import Table
from lingvo_gshard.planning.foreign_trials import Found, Task, Trial
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import foreign, topology
from lingvo_gshard.spmd.foreign import ForeignProgram

SEARCH_JSON = "program_search.json"

_FITTING = 5  # How many tables are compiled that fit, and how many in all.
_MOST_COMPILED = 8


def search(
    jitted: Any,
    args: Sequence[Any],
    on: str,
    *,
    letters: Sequence[str] = (),
    axes: Sequence[str] = (),
    mesh: str | None = None,
    roles: Sequence[str] = (),
    categories: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Found:
    """Returns the tables that are best for `jitted(*args)` on a topology.

    Args:
      jitted: a function of jax.jit, with its donate_argnums.
      args: trees of arrays or ShapeDtypeStructs, with shardings for as many devices as the topology
        has, or with none.
      on: the topology's name, such as `v5p:4x4x4`.
      letters: `REGEX=LETTERS` of the dims of arguments; see argument_letters.
      axes: one or two names of axes; the program's own by default, or data and model. The first
        splits the batch.
      mesh: the sizes of the axes, such as `data:16,model:4`, if only tables shall be tried.
      roles: as any_program.of.
      categories: as any_program.of.
      progress: is called with a line for each part of the search once it is known.

    reannotated.in_shardings makes shardings of a trial's splits. Raises ValueError as
    argument_letters.read and any_program.of, for other axes, or if no table divides the arguments.
    """
    program = foreign.of_jitted(jitted, args, topology.platform(on))
    return make(program, on, letters, axes, mesh, roles, categories, progress)


def of_file(
    path: pathlib.Path,
    topology_name: str,
    letters: Sequence[str],
    axes: Sequence[str],
    mesh: str | None,
    roles: Sequence[str],
    categories: Sequence[str],
    progress: Callable[[str], None],
) -> Found:
    """Returns the best tables of the program in a file.

    Raises ValueError as foreign.read and `search`.
    """
    program = foreign.read(path, topology.platform(topology_name))
    return make(program, topology_name, letters, axes, mesh, roles, categories, progress)


@dataclasses.dataclass(frozen=True)
class Request:
    """A search that is made in a process of its own: see of_file."""

    path: pathlib.Path
    topology_name: str
    letters: Sequence[str]
    axes: Sequence[str]
    mesh: str | None
    roles: Sequence[str]
    categories: Sequence[str]
    folder: pathlib.Path  # Where it is saved.
    progress: Callable[[str], None]

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return f"--program={self.path}"


def save_search(request: Request) -> str:
    """Searches and saves what is found; returns its text. Raises ValueError as of_file."""
    found = of_file(
        request.path,
        request.topology_name,
        request.letters,
        request.axes,
        request.mesh,
        request.roles,
        request.categories,
        request.progress,
    )
    save(found, request.folder)
    return foreign_search_text.search_text(found)


def make(
    program: ForeignProgram,
    topology_name: str,
    letter_texts: Sequence[str],
    axes: Sequence[str],
    mesh_text: str | None,
    roles: Sequence[str],
    categories: Sequence[str],
    progress: Callable[[str], None],
) -> Found:
    """Returns the best tables of a program. Raises ValueError as `search`."""
    # What can be wrong is found before the compiler takes minutes.
    num_devices = len(topology.devices(topology_name))
    is_replicated = _check_partitions(program, topology_name, num_devices)
    meshes = list(foreign_tables.meshes(program, axes, mesh_text, num_devices))
    letters = argument_letters.read(program, letter_texts)
    progress(foreign_search_text.letters_text(program, letters))

    task = Task(program, letters, topology_name, roles, categories)
    cost = ForeignCost(letters, topology_name)
    tables = foreign_tables.ranked(program, letters, cost, meshes, task.capacity_gib)
    if not tables:
        sizes = ", ".join(f"{name} {size}" for name, size in letters.sizes.items())
        raise ValueError(
            f"--search: no mesh of {num_devices} devices divides the letters of {program.name} so "
            f"that its arguments fit; their sizes are {sizes}."
        )

    given_program = program
    if is_replicated:
        given_program = foreign_trials.partitioned(
            program, letters, Mesh((foreign_tables.AXES[0],), (num_devices,)), ()
        )
    given = any_program.make(given_program, topology_name, None, roles, categories)
    progress(foreign_search_text.given_line(given, is_replicated))
    progress(f"{len(tables)} tables divide the arguments; the best by an estimate are compiled:")

    trials = _compile_best(task, cost, tables, progress)
    return Found(program, topology_name, letters, len(tables), given, is_replicated, trials)


def save(found: Found, folder: pathlib.Path) -> None:
    """Writes folder/program_search.json, the trials, and folder/report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for trial in found.trials:
        plan = dataclasses.asdict(trial.plan) if trial.plan else None
        splits = {name: list(split) for name, split in trial.splits.items()}
        records.append({"table": trial.table.name, "splits": splits, "plan": plan})
    content = json.dumps({"given": dataclasses.asdict(found.given), "trials": records}, indent=2)
    atomic_file.write(folder / SEARCH_JSON, f"{content}\n")
    title = f"# {found.program.name} on {found.topology}: a search"
    letters = foreign_search_text.letters_text(found.program, found.letters)
    ranking = foreign_search_text.search_text(found)
    report = f"{title}\n\n```\n{letters}\n\n{ranking}\n```\n"
    atomic_file.write(folder / "report.md", report)


def _check_partitions(program: ForeignProgram, topology_name: str, num_devices: int) -> bool:
    """Returns whether a program says nothing of shardings, so that every device would do all.

    Raises ValueError if it is partitioned for another number of devices than the topology has.
    """
    says_nothing = not any(argument.has_sharding for argument in program.arguments)
    if program.num_partitions == 1 and says_nothing:
        return True
    if program.num_partitions != num_devices:
        raise ValueError(
            f"program {program.name} is partitioned for {program.num_partitions} devices, and "
            f"topology {topology_name} has {num_devices}."
        )
    return says_nothing


def _compile_best(
    task: Task, cost: ForeignCost, tables: Sequence[Table], progress: Callable[[str], None]
) -> tuple[Trial, ...]:
    """Returns the trials of the first tables that fit by the estimate, the fastest first."""
    trials: list[Trial] = []
    least: Table | None = None
    for candidate in tables:
        num_fitting = sum(trial.step_secs < math.inf for trial in trials)
        if num_fitting == _FITTING or len(trials) == _MOST_COMPILED:
            break
        if any(foreign_trials.are_alike(task, candidate, trial.table) for trial in trials):
            continue
        gib = cost.gib(candidate.mesh, candidate.rows)
        estimated = dataclasses.replace(candidate, gib=gib)
        if gib > task.capacity_gib:
            if least is None or gib < least.gib:
                least = estimated
            continue
        trials.append(foreign_trials.compile_table(task, estimated))
        progress(foreign_search_text.trial_line(trials[-1]))

    # Where nothing fits by the estimate, it may be too high.
    if not trials and least is not None:
        trials.append(foreign_trials.compile_table(task, least))
        progress(foreign_search_text.trial_line(trials[-1]))
    return tuple(sorted(trials, key=lambda trial: trial.step_secs))
