"""A search over a foreign program's splits as text: letters, trials, and Python to paste."""

import math
from collections.abc import Iterator, Sequence

from lingvo_gshard.files import table
from lingvo_gshard.planning import argument_letters, argument_paths
from lingvo_gshard.planning.argument_letters import Letters
from lingvo_gshard.planning.estimate import agreement
from lingvo_gshard.planning.foreign_trials import Found, Trial, step_secs
from lingvo_gshard.planning.plan import GIB, Times
from lingvo_gshard.planning.program_plan import AnyPlan
from lingvo_gshard.spmd import reannotated
from lingvo_gshard.spmd.foreign import ForeignProgram


def letters_text(program: ForeignProgram, letters: Letters) -> str:
    """Returns the letters with their sizes, and of each kind of argument its letters."""
    sums = argument_letters.bytes_by_letter(program, letters)
    rows: list[Sequence[object]] = [("letter", "size", "GiB of arguments")]
    for letter, size in letters.sizes.items():
        name = f"{letter}, the batch" if letter == letters.batch else letter
        rows.append((name, size, f"{sums[letter] / GIB:.3f}"))
    lines = [table.text(rows), "their places, to be changed by --letters:"]
    labels = [" ".join(names) for names in letters.arguments]
    for pattern, label in argument_paths.by_pattern(program, labels):
        if label:
            lines.append(f"  --letters='{pattern}={label}'")
    return "\n".join(lines)


def given_line(given: AnyPlan, is_replicated: bool) -> str:
    """Returns the outcome of the program as it was given in one line."""
    return f"{_given_name(is_replicated)}: {_outcome(given)}"


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
            f"compiled ones, rank correlation {table.number(agreed.rank_correlation)}"
        )
    best = found.best
    if best is None:
        lines.append("chosen: none, as no table is faster than what was given")
        return "\n".join(lines)

    lines.append(f"chosen: {best.table.name}, {_gain(found, best)}")
    lines += _pasted(found.program, best)
    return "\n".join(lines)


def _gain(found: Found, best: Trial) -> str:
    given_secs = step_secs(found.given)
    if given_secs == math.inf:
        return "which fits where what was given does not"
    return f"{given_secs / best.step_secs:.2f} times as fast as what was given"


def _given_name(is_replicated: bool) -> str:
    return "as it was given, replicated" if is_replicated else "as it was given"


def _outcome(plan: AnyPlan) -> str:
    held = plan.memory_gib
    if not plan.fits:
        return f"does not fit, {held.peak:.2f} of {held.capacity:.2f} GiB"
    return f"fits, {held.peak:.2f} GiB, {1e3 * step_secs(plan):.3g} ms a call"


def _cells(plan: AnyPlan) -> list[str]:
    gib = f"{plan.memory_gib.peak:.2f}"
    if plan.cost is None:
        return [gib, "does not fit", "-", "-", "-"]
    secs: Times = plan.cost.roofline_secs
    parts = (step_secs(plan), secs.compute, secs.memory, secs.network)
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
    for pattern, label in argument_paths.by_pattern(program, labels):
        yield f'    r"{pattern}": {label},'
    yield "}"
