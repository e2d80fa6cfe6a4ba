"""The one table: from the letters of logical dims to the axes of the mesh.

Letters are the paper's: B batch, L length, T length of the source or of what is attended to, S
tokens of a group, M model, H hidden, N heads, D head size, V vocabulary, G groups, E experts,
C capacity. K counts the steps of one call, R the blocks that share a stack of weights; U is the
batch at the softmax; `_` is never split. A lowercase letter is the same dim in the optimizer: of
slots, and of gradients and weights in their update.
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
    """Raises a ValueError, prefixed by `what`, if `dims` hold a letter other than `_` twice."""
    twice = sorted({letter for letter in dims if letter != "_" and dims.count(letter) > 1})
    if twice:
        raise ValueError(
            f"{what}: dims {dims!r} name {', '.join(twice)} twice; a dim is named once, `_` is "
            f"one that is never split."
        )


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """A mesh and the table from letters to its axes.

    Raises ValueError if a key is no letter or occurs twice, or if the mesh lacks an axis.
    """

    mesh: Mesh
    table: tuple[tuple[str, Axis], ...]  # A letter without a row is not split.

    def __post_init__(self) -> None:
        letters = [letter for letter, _ in self.table]
        if len(set(letters)) != len(letters):
            raise ValueError(f"Partitioning: a letter is used twice in the table {self.table}.")
        for letter, axis in self.table:
            if len(letter) != 1 or not letter.isalpha():
                raise ValueError(
                    f"Partitioning: expected single letters, got {letter!r} in {self.table}."
                )
            self.mesh.size(axis)

    @staticmethod
    def from_dict(mesh: Mesh, table: Mapping[str, Axis]) -> "Partitioning":
        """The partitioning of a {letter: axis} table."""
        return Partitioning(mesh, tuple(sorted(table.items())))

    @staticmethod
    def parse(mesh: Mesh, text: str) -> "Partitioning":
        """The partitioning of a table such as `BG:data+experts,E:experts,U:-`.

        A row has letters and their axes, or `-`. ValueError for another text; and as Partitioning.
        """
        rows: list[tuple[str, Axis]] = []
        for row in text.split(",") if text else []:
            letters, _, axis = row.strip().partition(":")
            if not letters or not axis:
                raise ValueError(
                    f"sharding={text}: expected letters with their axes, or - for none, such as "
                    "BG:data+experts,E:experts."
                )
            axes = () if axis == "-" else tuple(axis.split("+"))
            rows += [(letter, axis if axes == (axis,) else axes) for letter in letters]
        return Partitioning(mesh, tuple(sorted(rows, key=lambda row: row[0])))

    def axes(self, dims: str) -> tuple[Axis | None, ...]:
        """The mesh axis of each dim: each letter in turn takes those of its axes still free.

        With {"G": ("x", "y"), "E": "y"}, GECM is split along G alone, by both axes; EGCM is split
        along E by y and along G by x. Without a row of its own a lowercase letter has its
        capital's, and U has B's.
        """
        table, taken = dict(self.table), set[str]()
        axes: list[Axis | None] = []
        for letter in dims:
            rows = map(table.get, (letter, letter.upper(), "B" if letter == "U" else ""))
            named = names_of([next((row for row in rows if row is not None), None)])
            free = tuple(name for name in named if name not in taken)
            taken.update(free)
            axes.append(free[0] if len(free) == 1 else free or None)
        return tuple(axes)

    def factor(self, dims: str) -> tuple[int, ...]:
        """How many ways each dim is split."""
        return tuple(map(self.mesh.size, self.axes(dims)))

    def shard_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The shape of one partition's part; an uneven dim is rounded up."""
        return tuple(
            -(-size // ways) for size, ways in zip(spec.shape, self.factor(spec.dims), strict=True)
        )

    def check(self, name: str, spec: TensorSpec) -> None:
        """Raises a ValueError if a dim of an argument or result is not divisible by its axis."""
        for letter, size, axis in zip(spec.dims, spec.shape, self.axes(spec.dims), strict=True):
            if size % self.mesh.size(axis):
                raise ValueError(
                    f"{name} {list(spec.shape)} with dims {spec.dims}: {letter}={size} is not "
                    f"divisible by the {self.mesh.size(axis)} partitions of mesh axis {axis!r}; "
                    f"choose another {letter} or number of partitions."
                )
