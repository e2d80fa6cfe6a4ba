"""The meshes and tables that a search over a program's splits ranks by their estimates.

All meshes of one or two axes are tried, and on each the tables from few letters to its axes. A
table is kept if it divides the dims of the arguments, and if they fit on the devices.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from xla_plan.program import argument_letters
from xla_plan.program.argument_letters import Letters
from xla_plan.program.stablehlo_program import StablehloProgram
from xla_plan.searches.axes import check as check_axes
from xla_plan.searches.axes import parse_mesh
from xla_plan.searches.table_cost import Rows, TableCost
from xla_spmd.hlo.hlo_module import num_bytes
from xla_spmd.mesh import Mesh

AXES = ("data", "model")  # The axes for a program that does not name two axes.

_MOST_LETTERS = 8  # The other letters are not split: they have few bytes and flops.
# The most letters that an axis splits: beside the batch, and without it.
_BESIDE_BATCH = 2
_MOST_OF_AXIS = 4

_Choice = tuple[tuple[str, ...], ...]  # The letters that each axis splits.


@dataclasses.dataclass(frozen=True)
class Table:
    """A mesh and the rows of a table, with their estimates."""

    mesh: Mesh
    rows: Rows
    secs: float  # The time of a call.
    gib: float  # The most memory of a device.

    @property
    def name(self) -> str:
        """The mesh and the table in one line: `mesh=data:4,model:4 B:data H:model`."""
        axes = ",".join(f"{name}:{size}" for name, size in self.mesh.shape.items())
        rows = " ".join(f"{letter}:{'+'.join(names)}" for letter, names in self.rows)
        return f"mesh={axes} {rows}".rstrip()


def meshes(
    program: StablehloProgram, axes: Sequence[str], text: str | None, num_devices: int
) -> Iterator[Mesh]:
    """Yields the meshes to try, whose first axis is for the batch.

    Raises ValueError for more than two axes, or for a mesh of another size.
    """
    if text is not None:
        yield parse_mesh(text, axes, num_devices)
        return

    names = tuple(axes) or tuple(program.axes)[:2]
    if not axes and len(names) < 2:
        names = (*names, *(name for name in AXES if name not in names))[:2]
    check_axes(names)

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


def ranked(
    program: StablehloProgram,
    letters: Letters,
    cost: TableCost,
    meshes: Sequence[Mesh],
    capacity_gib: float,
) -> list[Table]:
    """Returns all tables whose arguments fit, the fastest by the estimate first."""
    names = _most_used(program, letters)
    sizes = [num_bytes([argument.array]) for argument in program.arguments]
    tables = []
    for mesh in meshes:
        for rows in _tables(letters, names, mesh):
            secs = cost.secs(mesh, rows)
            gib = cost.argument_gib(mesh, rows, sizes)
            if gib <= capacity_gib:
                tables.append(Table(mesh, rows, secs, gib))

    # Among equally good tables, the one with the fewest rows comes first.
    tables.sort(key=lambda table: (table.secs, len(table.rows)))
    return tables


def _tables(letters: Letters, names: Sequence[str], mesh: Mesh) -> Iterator[Rows]:
    """Yields the tables of a mesh whose letters' sizes its axes divide."""
    for choice in _choices(letters.batch, names, len(mesh.axis_names)):
        # The batch comes first: among the dims of a tensor, it is the first to take an axis.
        rows = []
        for letter in names:
            axes = zip(mesh.axis_names, choice, strict=True)
            taken = tuple(axis for axis, chosen in axes if letter in chosen)
            if taken:
                rows.append((letter, taken))
        if all(letters.sizes[letter] % mesh.size(taken) == 0 for letter, taken in rows):
            yield tuple(rows)


def _choices(batch: str | None, names: Sequence[str], num_axes: int) -> Iterable[_Choice]:
    """Returns the letters that each axis may split.

    The first axis splits the batch, and perhaps weights, which are then gathered when they are
    used; the second splits letters of activations, of weights, or more of the batch.
    """
    others = [name for name in names if name != batch]
    of_batch: list[tuple[str, ...]] = []
    if batch is not None:
        for count in range(_BESIDE_BATCH + 1):
            of_batch += [(batch, *more) for more in itertools.combinations(others, count)]
    of_any: list[tuple[str, ...]] = []
    for count in range(1, _MOST_OF_AXIS + 1):
        of_any += itertools.combinations(names, count)

    if num_axes == 1:
        return [(chosen,) for chosen in dict.fromkeys(of_batch + of_any)]
    # Two axes that split the same letters are one axis of a smaller mesh.
    pairs = itertools.product(of_batch or of_any, of_any)
    return (pair for pair in pairs if set(pair[0]) != set(pair[1]))


def _most_used(program: StablehloProgram, letters: Letters) -> list[str]:
    """Returns the letters that are worth splitting: the batch, then by their bytes."""
    sums = argument_letters.bytes_by_letter(program, letters)
    by_bytes = sorted(sums, key=lambda letter: (letter != letters.batch, -sums[letter]))
    return by_bytes[:_MOST_LETTERS]
