"""Searches for better splits of a foreign program's arguments: `plan --program=FILE --search`.

from lingvo_gshard import planning

found = planning.search(step, (state, batch), "v5e:4x4", letters=[".*mlp/wi=M H"])
print(planning.search_text(found))

The program's arguments get letters (argument_letters.py), and all small meshes and tables from the
letters to their axes are ranked by an estimate (estimate/foreign_cost.py). The best few are
compiled and planned, beside the program as it was given. Only the annotations are changed: those of
the arguments, of the results that lie in their memory, and of the program's own constraints, which
follow by their letters. XLA propagates the rest.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lingvo_gshard.files import atomic_file, table
from lingvo_gshard.hlo.hlo_module import num_bytes
from lingvo_gshard.planning import any_program, argument_letters
from lingvo_gshard.planning.any_program import AnyPlan
from lingvo_gshard.planning.argument_letters import Letters
from lingvo_gshard.planning.estimate import agreement, foreign_cost, hardware
from lingvo_gshard.planning.estimate.foreign_cost import ForeignCost, Rows, Split
from lingvo_gshard.planning.plan import GIB, Times
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import foreign, reannotated, topology
from lingvo_gshard.spmd.dims.dim_sets import Dims
from lingvo_gshard.spmd.foreign import ForeignProgram

SEARCH_JSON = "program_search.json"

_AXES = ("data", "model")  # The axes of a program that names no two of its own.
_FITTING = 5  # How many tables are compiled that fit, and how many in all.
_MOST_COMPILED = 8
_MOST_LETTERS = 8  # Those that are split; the others have few bytes and few flops.
# How many letters an axis splits in a tensor's stead: beside the batch, and without it.
_BESIDE_BATCH = 2
_MOST_OF_AXIS = 4
_SAME_SHARE = 0.05  # Tables that split less than this share of the bytes otherwise are alike.


@dataclasses.dataclass(frozen=True)
class Table:
    """A mesh and the rows of a table, with their estimates."""

    mesh: Mesh
    rows: Rows
    secs: float  # Of a call.
    gib: float  # The most on a device.

    @property
    def name(self) -> str:
        """The mesh and the table in one line: `mesh=data:4,model:4 B:data H:model`."""
        axes = ",".join(f"{name}:{size}" for name, size in self.mesh.shape.items())
        rows = " ".join(f"{letter}:{'+'.join(names)}" for letter, names in self.rows)
        return f"mesh={axes} {rows}".rstrip()


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
        return _step_secs(self.plan)


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
        if not self.trials or self.trials[0].step_secs >= _step_secs(self.given):
            return None
        return self.trials[0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    """What is searched for."""

    program: ForeignProgram
    letters: Letters
    topology: str
    roles: Sequence[str]
    categories: Sequence[str]

    @property
    def capacity_gib(self) -> float:
        return hardware.generation(self.topology).capacity_gib


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
    return search_text(found)


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
    meshes = list(_meshes(program, axes, mesh_text, num_devices))
    letters = argument_letters.read(program, letter_texts)
    progress(letters_text(program, letters))

    task = _Task(program, letters, topology_name, roles, categories)
    cost = ForeignCost(letters, topology_name)
    tables = _ranked(task, cost, meshes)
    if not tables:
        sizes = ", ".join(f"{name} {size}" for name, size in letters.sizes.items())
        raise ValueError(
            f"--search: no mesh of {num_devices} devices divides the letters of {program.name} so "
            f"that its arguments fit; their sizes are {sizes}."
        )

    given_program = program
    if is_replicated:
        given_program = _partitioned(program, letters, Mesh((_AXES[0],), (num_devices,)), ())
    given = any_program.make(given_program, topology_name, None, roles, categories)
    progress(f"{_given_name(is_replicated)}: {_outcome(given)}")
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
    letters = letters_text(found.program, found.letters)
    atomic_file.write(
        folder / "report.md", f"{title}\n\n```\n{letters}\n\n{search_text(found)}\n```\n"
    )


def _step_secs(plan: AnyPlan | None) -> float:
    return plan.cost.step_secs if plan and plan.cost else math.inf


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


# --- Candidates ---


def _meshes(
    program: ForeignProgram, axes: Sequence[str], text: str | None, num_devices: int
) -> Iterator[Mesh]:
    """Yields the meshes to try, whose first axis is for the batch.

    Raises ValueError for more than two axes, or for a mesh of another size.
    """
    if text is not None:
        mesh = Mesh.parse(text, num_devices)
        if len(mesh.axis_names) > 2 or (axes and set(axes) != set(mesh.axis_names)):
            raise ValueError(f"--mesh={text}: --search takes one or two axes, and those of --axes.")
        yield mesh
        return

    names = tuple(axes) or tuple(program.axes)[:2]
    if not axes and len(names) < 2:
        names = (*names, *(name for name in _AXES if name not in names))[:2]
    if not 1 <= len(names) <= 2 or len(set(names)) != len(names):
        raise ValueError(f"--axes={','.join(names)}: expected one or two names of axes.")

    for size in range(1, num_devices + 1):
        if num_devices % size == 0:
            sizes = {names[0]: num_devices // size}
            if size > 1:
                # The last axis is the one whose devices are neighbours.
                sizes[names[-1]] = size
            used = {name: count for name, count in sizes.items() if count > 1}
            if math.prod(used.values()) == num_devices:
                kept = used or {names[0]: 1}
                yield Mesh(tuple(kept), tuple(kept.values()))


def _tables(letters: Letters, names: Sequence[str], mesh: Mesh) -> Iterator[Rows]:
    """Yields the tables of a mesh whose letters' sizes its axes divide.

    The first axis splits the batch, and perhaps weights, which are then gathered when they are
    used; the second splits letters of activations, of weights, or more of the batch.
    """
    batch = letters.batch
    others = [name for name in names if name != batch]
    of_batch: list[tuple[str, ...]] = []
    if batch is not None:
        for count in range(_BESIDE_BATCH + 1):
            of_batch += [(batch, *more) for more in itertools.combinations(others, count)]
    of_any: list[tuple[str, ...]] = []
    for count in range(1, _MOST_OF_AXIS + 1):
        of_any += itertools.combinations(names, count)

    if len(mesh.axis_names) == 1:
        choices: Iterator[tuple[tuple[str, ...], ...]] = iter(
            [(chosen,) for chosen in dict.fromkeys(of_batch + of_any)]
        )
    else:
        # Two axes that split the same letters are one axis of a smaller mesh.
        pairs = itertools.product(of_batch or of_any, of_any)
        choices = (pair for pair in pairs if set(pair[0]) != set(pair[1]))

    for choice in choices:
        # The batch comes first: of the dims of a tensor it is the first to take an axis.
        rows = []
        for letter in names:
            axes = zip(mesh.axis_names, choice, strict=True)
            taken = tuple(axis for axis, chosen in axes if letter in chosen)
            if taken:
                rows.append((letter, taken))
        table_rows = tuple(rows)
        if all(letters.sizes[letter] % mesh.size(taken) == 0 for letter, taken in table_rows):
            yield table_rows


def _most_used(program: ForeignProgram, letters: Letters) -> list[str]:
    """Returns the letters that are worth splitting: the batch, then those of the most bytes."""
    sums = argument_letters.bytes_by_letter(program, letters)
    by_bytes = sorted(sums, key=lambda letter: (letter != letters.batch, -sums[letter]))
    return by_bytes[:_MOST_LETTERS]


def _ranked(task: _Task, cost: ForeignCost, meshes: Sequence[Mesh]) -> list[Table]:
    """Returns all tables whose arguments fit, the fastest by the estimate first."""
    names = _most_used(task.program, task.letters)
    sizes = [num_bytes([argument.array]) for argument in task.program.arguments]
    tables = []
    for mesh in meshes:
        for rows in _tables(task.letters, names, mesh):
            secs = cost.secs(mesh, rows)
            gib = cost.argument_gib(mesh, rows, sizes)
            if gib <= task.capacity_gib:
                tables.append(Table(mesh, rows, secs, gib))

    # Of tables that are as good, the one with the fewest rows is the plainest.
    tables.sort(key=lambda table: (table.secs, len(table.rows)))
    return tables


def _compile_best(
    task: _Task, cost: ForeignCost, tables: Sequence[Table], progress: Callable[[str], None]
) -> tuple[Trial, ...]:
    """Returns the trials of the first tables that fit by the estimate, the fastest first."""
    trials: list[Trial] = []
    least: Table | None = None
    for candidate in tables:
        num_fitting = sum(trial.step_secs < math.inf for trial in trials)
        if num_fitting == _FITTING or len(trials) == _MOST_COMPILED:
            break
        if any(_are_alike(task, candidate, trial.table) for trial in trials):
            continue
        gib = cost.gib(candidate.mesh, candidate.rows)
        estimated = dataclasses.replace(candidate, gib=gib)
        if gib > task.capacity_gib:
            if least is None or gib < least.gib:
                least = estimated
            continue
        trials.append(_compile(task, estimated))
        progress(trial_line(trials[-1]))

    # Where nothing fits by the estimate, it may be too high.
    if not trials and least is not None:
        trials.append(_compile(task, least))
        progress(trial_line(trials[-1]))
    return tuple(sorted(trials, key=lambda trial: trial.step_secs))


def _are_alike(task: _Task, a: Table, b: Table) -> bool:
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


# --- Trials ---


def _compile(task: _Task, chosen: Table) -> Trial:
    splits = {}
    for argument, names in zip(task.program.arguments, task.letters.arguments, strict=True):
        splits[argument.name] = foreign_cost.split(names, chosen.rows)
    partitioned = _partitioned(task.program, task.letters, chosen.mesh, chosen.rows)
    try:
        plan = any_program.make(partitioned, task.topology, None, task.roles, task.categories)
    except ValueError as error:
        return Trial(chosen, splits, None, str(error).splitlines()[0])
    return Trial(chosen, splits, plan)


def _partitioned(
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


# --- The search as text ---


def letters_text(program: ForeignProgram, letters: Letters) -> str:
    """Returns the letters with their sizes, and of each kind of argument its letters."""
    sums = argument_letters.bytes_by_letter(program, letters)
    rows: list[Sequence[object]] = [("letter", "size", "GiB of arguments")]
    for letter, size in letters.sizes.items():
        name = f"{letter}, the batch" if letter == letters.batch else letter
        rows.append((name, size, f"{sums[letter] / GIB:.3f}"))
    lines = [table.text(rows), "their places, to be changed by --letters:"]
    labels = [" ".join(names) for names in letters.arguments]
    for pattern, label in _by_pattern(program, labels):
        if label:
            lines.append(f"  --letters='{pattern}={label}'")
    return "\n".join(lines)


def trial_line(trial: Trial) -> str:
    """Returns the outcome of a trial in one line."""
    name = trial.table.name
    if trial.plan is None:
        return f"{name}: refused: {trial.refusal}"
    return f"{name}: {_outcome(trial.plan)}, {1e3 * trial.table.secs:.3g} ms estimated"


def search_text(found: Found) -> str:
    """Returns the ranking beside the program as it was given, and the best table to paste."""
    rows: list[Sequence[object]] = [
        ("partitioning", "GiB", "step ms", "compute", "memory", "network", "estimated ms")
    ]
    rows.append((_given_name(found.is_replicated), *_cells(found.given), "-"))
    for trial in found.trials:
        if trial.plan is not None:
            estimated = f"{1e3 * trial.table.secs:.3g}"
            rows.append((trial.table.name, *_cells(trial.plan), estimated))
    lines = [table.text(rows)]

    fitting = [trial for trial in found.trials if trial.step_secs < math.inf]
    if len(fitting) > 1:
        agreed = agreement.of([(t.table.secs, t.step_secs) for t in fitting])
        lines.append(
            f"the estimates: {agreed.least_ratio:.2f} to {agreed.greatest_ratio:.2f} of the "
            f"compiled ones, rank correlation {agreed.rank_correlation:.2f}"
        )
    best = found.best
    if best is None:
        lines.append("chosen: none, as no table is faster than what was given")
        return "\n".join(lines)

    lines.append(f"chosen: {best.table.name}, {_gain(found, best)}")
    lines += _pasted(found.program, best)
    return "\n".join(lines)


def _gain(found: Found, best: Trial) -> str:
    given_secs = _step_secs(found.given)
    if given_secs == math.inf:
        return "which fits where what was given does not"
    return f"{given_secs / best.step_secs:.2f} times as fast as what was given"


def _given_name(is_replicated: bool) -> str:
    return "as it was given, replicated" if is_replicated else "as it was given"


def _outcome(plan: AnyPlan) -> str:
    held = plan.memory_gib
    if not plan.fits:
        return f"does not fit, {held.peak:.2f} of {held.capacity:.2f} GiB"
    return f"fits, {held.peak:.2f} GiB, {1e3 * _step_secs(plan):.3g} ms a call"


def _cells(plan: AnyPlan) -> list[str]:
    gib = f"{plan.memory_gib.peak:.2f}"
    if plan.cost is None:
        return [gib, "does not fit", "-", "-", "-"]
    secs: Times = plan.cost.roofline_secs
    parts = (_step_secs(plan), secs.compute, secs.memory, secs.network)
    return [gib, *(f"{1e3 * part:.3g}" for part in parts)]


def _pasted(program: ForeignProgram, trial: Trial) -> Iterator[str]:
    """Yields the lines of a table as Python that names the mesh and the arguments' specs."""
    shape = trial.table.mesh.shape
    auto = f"(jax.sharding.AxisType.Auto,) * {len(shape)}"
    yield f"mesh = jax.make_mesh({tuple(shape.values())}, {tuple(shape)}, axis_types={auto})"
    yield "P = jax.sharding.PartitionSpec"
    yield "specs = {  # The first pattern that matches an argument's whole path is its own."
    labels = []
    for argument in program.arguments:
        # Its repr has the name of the class, which JAX has changed.
        spec = reannotated.partition_spec(trial.splits[argument.name])
        labels.append(f"P({', '.join(map(repr, spec))})")
    for pattern, label in _by_pattern(program, labels):
        yield f'    r"{pattern}": {label},'
    yield "}"


def _by_pattern(program: ForeignProgram, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields patterns of arguments' whole paths and their labels, as few as tell labels apart.

    A pattern is the end of a path, as long as is needed, with any number for each number.
    """
    steps = [argument_letters.pattern(argument.name) for argument in program.arguments]
    paths = [argument_letters.path(argument.name) for argument in program.arguments]
    told = set()
    for path, own, label in zip(paths, steps, labels, strict=True):
        # Numbers count only where arguments that differ in them have different labels.
        pattern = re.escape(path)
        for count in range(1, len(own) + 1):
            if _labels_of(own[-count:], steps, labels) == {label}:
                pattern = "/".join(own[-count:])
                if count < len(own):
                    pattern = f".*/{pattern}"
                break
        if pattern not in told:
            told.add(pattern)
            yield pattern, label


def _labels_of(
    end: tuple[str, ...], steps: Sequence[tuple[str, ...]], labels: Sequence[str]
) -> set[str]:
    """Returns the labels of all paths with an end."""
    pairs = zip(steps, labels, strict=True)
    return {label for own, label in pairs if own[-len(end) :] == end}
