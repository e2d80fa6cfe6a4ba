"""A search over a program's splits as text: letters, trials, and Python to paste."""

from collections.abc import Iterator, Sequence

from xla_plan.machines.hardware import GIB
from xla_plan.program import argument_letters, argument_paths, reannotated
from xla_plan.program.argument_letters import Letters
from xla_plan.program.stablehlo_program import StablehloProgram
from xla_plan.searches import trials_text
from xla_plan.searches.table_trials import Found, TableTrial
from xla_spmd.files import table

_MOST_PLACES = 12  # How many kinds of arguments are shown on a screen.


def letters_text(program: StablehloProgram, letters: Letters, *, in_full: bool = True) -> str:
    """Returns the letters with their sizes, and the letters of each kind of argument.

    Without `in_full` only the first of many kinds of arguments are shown.
    """
    sums = argument_letters.bytes_by_letter(program, letters)
    rows: list[Sequence[object]] = [("letter", "size", "GiB of arguments")]
    for letter, size in letters.sizes.items():
        name = f"{letter}, the batch" if letter == letters.batch else letter
        rows.append((name, size, f"{sums[letter] / GIB:.3f}"))
    lines = [table.text(rows), "their places, to be changed by --letters:"]
    labels = [" ".join(names) for names in letters.arguments]
    places = []
    for pattern, label in argument_paths.by_pattern(program, labels):
        if label:
            places.append(f"  --letters='{pattern}={label}'")

    shown = len(places) if in_full else _MOST_PLACES
    lines += places[:shown]
    if len(places) > shown:
        lines.append(f"  and {len(places) - shown} more, which the report has")
    return "\n".join(lines)


def search_text(found: Found) -> str:
    """Returns the ranking, with the given program, and the best table to paste."""
    lines = [trials_text.ranking(found.trials, found.given)]
    if found.best is not None:
        lines += _pasted(found.program, found.best)
    return "\n".join(lines)


def _pasted(program: StablehloProgram, trial: TableTrial) -> Iterator[str]:
    """Yields the lines of a table as Python that names the mesh and the arguments' specs."""
    shape = trial.table.mesh.shape
    auto = f"(jax.sharding.AxisType.Auto,) * {len(shape)}"
    yield f"mesh = jax.make_mesh({tuple(shape.values())}, {tuple(shape)}, axis_types={auto})"
    yield "P = jax.sharding.PartitionSpec"
    yield "specs = {  # The first pattern that matches an argument's whole path is its own."
    labels = []
    for argument in program.arguments:
        # Its repr contains the name of the class, which differs between versions of JAX.
        spec = reannotated.partition_spec(trial.splits[argument.name])
        labels.append(f"P({', '.join(map(repr, spec))})")
    for pattern, label in argument_paths.by_pattern(program, labels):
        yield f'    r"{pattern}": {label},'
    yield "}"
