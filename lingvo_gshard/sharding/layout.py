"""The one table: from the letters of logical dims to the axes of the mesh.

The paper's letters:

    B  batch        L  length                  T  length of the source, or of what is attended to
    G  groups       S  tokens of a group       M  model
    E  experts      C  capacity of an expert   H  hidden
    N  heads        D  size of a head          V  vocabulary

And ours: K are the steps of one call, R the blocks whose weights are stacked, U is the batch at the
softmax, and `_` is a dim that is never split. A lowercase letter is the same dim in the optimizer:
of its slots, and of gradients and weights in their update.
"""

import dataclasses
from collections.abc import Mapping

from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor's logical shape, numpy dtype name, and one letter for each dim."""

    shape: tuple[int, ...]
    dtype: str
    dims: str

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.dims):
            raise ValueError(
                f"TensorSpec: shape {self.shape} has rank {len(self.shape)}, but dims "
                f"{self.dims!r} name {len(self.dims)}."
            )
        check_named_once(f"TensorSpec of shape {self.shape}", self.dims)


def check_named_once(what: str, dims: str) -> None:
    """Raises a ValueError, prefixed by `what`, if `dims` repeat a letter other than `_`."""
    twice = sorted({letter for letter in dims if letter != "_" and dims.count(letter) > 1})
    if twice:
        raise ValueError(
            f"{what}: dims {dims!r} name {', '.join(twice)} twice; each letter may occur once, and "
            "only `_`, a dim that is never split, more often."
        )


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """A mesh and the table from letters to its axes.

    Raises ValueError if a key is not a letter or occurs twice, or if the mesh lacks an axis.
    """

    mesh: Mesh
    table: tuple[tuple[str, Axis], ...]  # A letter without a row is not split.

    def __post_init__(self) -> None:
        # Rows are a tuple and no dict, so that a Partitioning can be hashed.
        letters = [letter for letter, _ in self.table]
        if len(set(letters)) != len(letters):
            raise ValueError(f"Partitioning: a letter is used twice in the table {self.table}.")

        for letter, axis in self.table:
            if len(letter) != 1 or not letter.isalpha():
                raise ValueError(
                    f"Partitioning: expected single letters, got {letter!r} in {self.table}."
                )
            self.mesh.size(axis)  # Raises if the mesh lacks it.

    @staticmethod
    def from_dict(mesh: Mesh, table: Mapping[str, Axis]) -> "Partitioning":
        """Returns the partitioning of a {letter: axis} table."""
        return Partitioning(mesh, tuple(sorted(table.items())))

    @staticmethod
    def parse(mesh: Mesh, text: str) -> "Partitioning":
        """Returns the partitioning of a table such as `BG:data+experts,E:experts,U:-`.

        Each row has letters and their axes, or `-` for none. Raises ValueError for other texts, and
        as Partitioning does.
        """
        if not text:
            return Partitioning(mesh, ())

        rows: list[tuple[str, Axis]] = []
        for row in text.split(","):
            letters, _, axis = row.strip().partition(":")
            if not letters or not axis:
                raise ValueError(
                    f"sharding={text}: expected letters with their axes, or - for none, such as "
                    "BG:data+experts,E:experts."
                )

            # A letter with `-` is not split, as is one without a row.
            names = () if axis == "-" else tuple(axis.split("+"))
            value: Axis = names[0] if len(names) == 1 else names
            rows += [(letter, value) for letter in letters]

        # Sorted, so that tables which differ in the order of their rows are equal.
        return Partitioning(mesh, tuple(sorted(rows, key=lambda row: row[0])))

    def axes(self, dims: str) -> tuple[Axis | None, ...]:
        """Returns the mesh axis of each dim: each letter in turn takes its free axes.

        With {"G": ("x", "y"), "E": "y"}, GECM is split along G alone, by both axes; EGCM is split
        along E by y and along G by x.
        """
        table = dict(self.table)
        taken: set[str] = set()
        axes: list[Axis | None] = []
        for letter in dims:
            # An axis can split only one dim of a tensor: the first that names it.
            names = names_of([_axis(table, letter)])
            free = tuple(name for name in names if name not in taken)
            taken.update(free)

            if not free:
                axes.append(None)
            elif len(free) == 1:
                axes.append(free[0])
            else:
                axes.append(free)
        return tuple(axes)

    def factor(self, dims: str) -> tuple[int, ...]:
        """Returns how many ways each dim is split."""
        return tuple(map(self.mesh.size, self.axes(dims)))

    def shard_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Returns the shape of one partition's part; an uneven dim is rounded up."""
        factors = self.factor(spec.dims)
        return tuple(-(-size // factor) for size, factor in zip(spec.shape, factors, strict=True))


def _axis(table: Mapping[str, Axis], letter: str) -> Axis | None:
    """Returns the axis of a letter.

    Without a row of its own, a lowercase letter has that of its capital, and U that of B.
    """
    if letter in table:
        return table[letter]
    if letter.upper() in table:
        return table[letter.upper()]
    if letter == "U":
        return table.get("B")
    return None
