"""Searches for better splits of a program's arguments: `plan search --program=FILE`.

import xla_plan

found = xla_plan.search(step, (state, batch), "v5e:4x4", letters=[".*mlp/wi=M H"])
print(xla_plan.search_text(found))

The program's arguments get letters (argument_letters.py). An estimate (table_cost.py) ranks all
small meshes and the tables from letters to their axes (tables.py). The best few are compiled and
planned (table_trials.py), beside the given program. Only the annotations are changed: on the
arguments, on the results in their memory, and on the program's own constraints, which follow by
their letters. XLA propagates the rest.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from xla_plan.machines import topology
from xla_plan.plans import programs
from xla_plan.plans.programs import Options
from xla_plan.program import argument_letters, program_file, stablehlo_program
from xla_plan.program.stablehlo_program import StablehloProgram
from xla_plan.searches import search_text, table_trials, tables, trials_text
from xla_plan.searches.table_cost import TableCost
from xla_plan.searches.table_trials import Found, TableTrial, Task
from xla_plan.searches.tables import Table
from xla_plan.searches.trials import Trial
from xla_spmd.files import atomic_file
from xla_spmd.mesh import Mesh

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
        has, or without shardings.
      on: the topology's name, such as `v5p:4x4x4`.
      letters: `REGEX=LETTERS` of the dims of arguments; see argument_letters.
      axes: one or two names of axes; the program's own by default, or data and model. The first
        splits the batch.
      mesh: the sizes of the axes, such as `data:16,model:4`, to try only the tables of this mesh.
      roles: `LABEL=REGEX` of arguments by name, such as `weights=params`.
      categories: `LABEL=REGEX` of operations by scope, such as `attention=/attn/`.
      progress: a function that gets a line about each finished part of the search.

    reannotated.in_shardings turns a trial's splits into shardings. Raises ValueError for an unknown
    topology, arguments for a different number of devices, a malformed pattern or one without a
    match, letters that do not fit the dims, axes that do not fit the mesh, or if no table divides
    the arguments.
    """
    program = stablehlo_program.of_jitted(jitted, args, topology.platform(on))
    options = Options(mesh=mesh, roles=roles, categories=categories)
    return make(program, on, letters, axes, options, progress)


@dataclasses.dataclass(frozen=True)
class Request:
    """A search over the program in a file: see `search`."""

    path: pathlib.Path
    topology: str
    letters: Sequence[str]
    axes: Sequence[str]
    options: Options
    folder: pathlib.Path  # The folder for the results.
    progress: Callable[[str], None]

    @property
    def label(self) -> str:
        """Its name, for messages."""
        return f"--program={self.path}"


def save_search(request: Request) -> str:
    """Searches for the best tables of the program in a file, and saves them; returns their text.

    Raises ValueError if the file does not hold a program for the topology, and in the cases that
    `search` lists.
    """
    program = program_file.read(request.path, topology.platform(request.topology))
    found = make(
        program,
        request.topology,
        request.letters,
        request.axes,
        request.options,
        request.progress,
    )
    save(found, request.folder)
    return search_text.search_text(found)


def make(
    program: StablehloProgram,
    topology_name: str,
    letter_texts: Sequence[str],
    axes: Sequence[str],
    options: Options,
    progress: Callable[[str], None],
) -> Found:
    """Returns the best tables of a program; `search` lists the conditions of ValueError."""
    # Mistakes are found before the compiler takes minutes.
    num_devices = len(topology.devices(topology_name))
    is_replicated = _check_partitions(program, topology_name, num_devices)
    meshes = list(tables.meshes(program, axes, options.mesh, num_devices))
    letters = argument_letters.read(program, letter_texts)
    progress(search_text.letters_text(program, letters, in_full=False))

    own_mesh = dataclasses.replace(options, mesh=None)  # Each table has its own.
    task = Task(program, letters, topology_name, own_mesh)
    cost = TableCost(letters, topology_name)
    ranked = tables.ranked(program, letters, cost, meshes, task.capacity_gib)
    if not ranked:
        sizes = ", ".join(f"{name} {size}" for name, size in letters.sizes.items())
        raise ValueError(
            f"no mesh of {num_devices} devices divides the letters of {program.name} so "
            f"that its arguments fit; their sizes are {sizes}."
        )

    given_program = program
    if is_replicated:
        given_program = table_trials.partitioned(
            program, letters, Mesh((tables.AXES[0],), (num_devices,)), ()
        )
    given = Trial(
        name="as it was given, replicated" if is_replicated else "as it was given",
        plan=programs.make(given_program, topology_name, task.options),
    )
    progress(trials_text.trial_line(given, "call"))
    progress(f"{len(ranked)} tables divide the arguments; the best by an estimate are compiled:")

    trials = _compile_best(task, cost, ranked, progress)
    return Found(program, topology_name, letters, len(ranked), given, is_replicated, trials)


def save(found: Found, folder: pathlib.Path) -> None:
    """Writes folder/program_search.json, the trials, and folder/report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for trial in found.trials:
        splits = {name: list(split) for name, split in trial.splits.items()}
        records.append({"table": trial.name, "splits": splits, "plan": _json(trial)})
    content = json.dumps({"given": _json(found.given), "trials": records}, indent=2)
    atomic_file.write(folder / SEARCH_JSON, f"{content}\n")
    title = f"# {found.program.name} on {found.topology}: a search"
    letters = search_text.letters_text(found.program, found.letters)
    ranking = search_text.search_text(found)
    report = f"{title}\n\n```\n{letters}\n\n{ranking}\n```\n"
    atomic_file.write(folder / "report.md", report)


def _json(trial: Trial) -> dict[str, Any] | None:
    return dataclasses.asdict(trial.plan) if trial.plan else None


def _check_partitions(program: StablehloProgram, topology_name: str, num_devices: int) -> bool:
    """Returns whether a program lacks shardings, so that every device would do all the work.

    Raises ValueError if it is partitioned for a number of devices that is not the topology's.
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
    task: Task, cost: TableCost, ranked: Sequence[Table], progress: Callable[[str], None]
) -> tuple[TableTrial, ...]:
    """Returns the trials of the first tables that fit by the estimate, the fastest first."""
    trials: list[TableTrial] = []
    least: Table | None = None
    for candidate in ranked:
        num_fitting = sum(trial.fits for trial in trials)
        if num_fitting == _FITTING or len(trials) == _MOST_COMPILED:
            break
        if any(table_trials.are_alike(task, candidate, trial.table) for trial in trials):
            continue
        gib = cost.gib(candidate.mesh, candidate.rows)
        estimated = dataclasses.replace(candidate, gib=gib)
        if gib > task.capacity_gib:
            if least is None or gib < least.gib:
                least = estimated
            continue
        trials.append(table_trials.compile_table(task, estimated))
        progress(trials_text.trial_line(trials[-1], "call"))

    # If no table fits by the estimate, the estimate may be too high.
    if not trials and least is not None:
        trials.append(table_trials.compile_table(task, least))
        progress(trials_text.trial_line(trials[-1], "call"))
    return tuple(sorted(trials, key=lambda trial: trial.secs.step))
