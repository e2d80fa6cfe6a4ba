"""The table that maps the letters of logical dims to the axes of the mesh.

The paper's letters:

        B  batch        L  length                  T  length of the source, or of the attended
        sequence
    G  groups       S  tokens of a group       M  model
    E  experts      C  capacity of an expert   H  hidden
    N  heads        D  size of a head          V  vocabulary

And ours: K is the steps of one call, R the blocks whose weights are stacked, U the batch at the
softmax, X and Y the rows and columns of images, and `_` a dim that is never split. A lowercase
letter is the same dim in the optimizer: in its slots, and in gradients and weights during their
update.

A row may apply to some tensors only. `weights.M` is M in weights, and `encoder.M` is M in the stack
of layers called `encoder`; `encoder.weights.M` is both.
"""

import dataclasses
import operator
import re
from collections.abc import Mapping
from typing import Any, Self

import ml_dtypes  # noqa: F401  (it registers the name bfloat16 with NumPy)
import numpy as np

from xla_spmd import checks
from xla_spmd.mesh import Axis, Mesh, names_of

# The letters above, except K, which is never split.
DIMS = "BLTGSMECHNDVRUXY"
# Every activation has one of these dims, but weights never do.
_ROW_DIMS = frozenset("BGU")
# The scope of rows that apply to weights.
_WEIGHTS = "weights"
# A letter for each dim.
_LETTERS = re.compile("[A-Za-z_]*")
# The key of a row: an optional stack, an optional `weights`, and a letter.
_KEY = re.compile(rf"(?:(?!{_WEIGHTS}\.)(\w+)\.)?(?:({_WEIGHTS})\.)?([A-Za-z])")


def is_weight(dims: str) -> bool:
    """Returns whether a tensor of these dims is a weight, a weight's gradient, or its slot.

    It is if none of its dims is a batch dim: B, G or U.
    """
    return not _ROW_DIMS & set(dims.upper())


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor's logical shape, numpy dtype name, and one letter for each dim.

    The shape may be given as any sequence of ints, and the dtype as NumPy's, TensorFlow's or JAX's.
    Raises ValueError for unknown sizes, an unknown dtype, and letters that do not fit the shape.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: str
    stack: str = ""  # The stack of layers whose rows split it; empty for the whole model.

    def __post_init__(self) -> None:
        # Callers also pass lists, or TensorFlow's and NumPy's own types.
        object.__setattr__(self, "shape", _sizes(self.shape))
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        checks.check_type("TensorSpec: dims", self.dims, str, "a letter for each dim, such as 'BM'")
        if not _LETTERS.fullmatch(self.dims):
            raise ValueError(f"TensorSpec: dims {self.dims!r}: expected letters, or `_`.")
        if len(self.shape) != len(self.dims):
            raise ValueError(
                f"TensorSpec: shape {self.shape} has rank {len(self.shape)}, but dims "
                f"{self.dims!r} name {len(self.dims)}."
            )
        check_named_once(f"TensorSpec of shape {self.shape}", self.dims)


def _sizes(shape: Any) -> tuple[int, ...]:
    """Returns a shape, an int or a sequence of ints, as a tuple.

    Raises ValueError for unknown sizes.
    """
    if isinstance(shape, int):
        return (shape,)
    try:
        sizes = tuple(map(operator.index, shape))
        if min(sizes, default=0) < 0:
            raise ValueError
        return sizes
    except (TypeError, ValueError):  # A shape of unknown rank is a ValueError, too.
        raise ValueError(
            f"TensorSpec: shape {shape}: expected the size of each dim, such as (32, 128)."
        ) from None


def _dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype of NumPy, TensorFlow or JAX.

    Raises ValueError for anything else.
    """
    try:
        return np.dtype(getattr(dtype, "as_numpy_dtype", dtype)).name
    except TypeError:
        raise ValueError(
            f"TensorSpec: dtype {dtype!r}: expected a name such as 'float32'."
        ) from None


def check_named_once(what: str, dims: str) -> None:
    """Raises ValueError, prefixed by `what`, if `dims` repeat a letter other than `_`."""
    twice = sorted({letter for letter in dims if letter != "_" and dims.count(letter) > 1})
    if twice:
        raise ValueError(
            f"{what}: dims {dims!r} name {', '.join(twice)} twice; each letter may occur once, and "
            "only `_`, a dim that is never split, more often."
        )


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """A mesh and the table from letters to its axes.

    The key of a row is a letter, optionally after a stack and the word `weights`: `M`, `weights.M`,
    `encoder.M` or `encoder.weights.M`. Raises ValueError if a key is malformed, occurs twice, or
    can never match a weight, or if the mesh lacks an axis.
    """

    mesh: Mesh
    table: tuple[tuple[str, Axis], ...]  # A letter without a row is not split.

    def __post_init__(self) -> None:
        checks.check_type("Partitioning: mesh", self.mesh, Mesh, "a Mesh, such as Mesh.flat(4)")
        # Rows are a tuple rather than a dict, so that a Partitioning can be hashed.
        keys = [key for key, _ in self.table]
        if len(set(keys)) != len(keys):
            raise ValueError(f"Partitioning: a letter is used twice in the table {self.table}.")

        for key, axis in self.table:
            self._check_key(key)
            self.mesh.size(axis)  # Raises if the mesh lacks it.

    def _check_key(self, key: str) -> None:
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(
                f"Partitioning: expected single letters, got {key!r} in {self.table}. A row for "
                "weights alone has the key weights.M, one for a stack the key encoder.M."
            )

        _, weights, letter = match.groups()
        if weights and letter.islower():
            raise ValueError(
                f"Partitioning: {key!r}: a lowercase letter names a dim of the optimizer, which "
                f"cannot have rows for weights; write {key.replace('weights.', '')!r}."
            )
        if weights and letter in _ROW_DIMS:
            raise ValueError(
                f"Partitioning: {key!r}: no weight has the dim {letter}; the rows of a batch are "
                "activations."
            )

    @staticmethod
    def from_dict(mesh: Mesh, table: Mapping[str, Axis]) -> "Partitioning":
        """Returns the partitioning of a {key: axis} table."""
        checks.check_type("Partitioning: table", table, Mapping, "a dict, such as {'B': 'd'}")
        return Partitioning(mesh, tuple(sorted(table.items())))

    @staticmethod
    def parse(mesh: Mesh, text: str) -> "Partitioning":
        """Parses a table such as `BG:data+experts,E:experts,U:-` into a partitioning.

        Each row has letters and their axes, or `-` for no axes. The letters may have a scope, as in
        `weights.MV:experts` or `encoder.BG:data`. Raises ValueError for a malformed text, and if
        the table or its axes are invalid (see Partitioning).
        """
        if not text:
            return Partitioning(mesh, ())

        rows: list[tuple[str, Axis]] = []
        for row in text.split(","):
            left, _, axis = row.strip().partition(":")
            scope, dot, letters = left.rpartition(".")
            if not letters or not axis:
                raise ValueError(
                    f"sharding={text}: expected letters with their axes, or - for no axes, such as "
                    "BG:data+experts,E:experts."
                )

            # A letter with `-` is not split, like a letter without a row.
            names = () if axis == "-" else tuple(axis.split("+"))
            mesh.check(f"sharding={text}", names)
            value: Axis = names[0] if len(names) == 1 else names
            rows += [(scope + dot + letter, value) for letter in letters]

        # Sorted, so that tables with the same rows in a different order are equal.
        return Partitioning(mesh, tuple(sorted(rows, key=lambda row: row[0])))

    def check_letters(self, what: str, known: str) -> None:
        """Raises ValueError, prefixed by `what`, if `known` lacks a row's letter in either case."""
        for key, _ in self.table:
            letter = key[-1]
            if letter.upper() not in known:
                raise ValueError(
                    f"{what}: no tensor of the model has a dim {letter}; its dims are "
                    f"{', '.join(sorted(known))}, and the same in lowercase in the optimizer."
                )

    @property
    def stacks(self) -> frozenset[str]:
        """The stacks with separate rows."""
        scopes = [key.split(".")[0] for key, _ in self.table if "." in key]
        return frozenset(scopes) - {_WEIGHTS}

    def in_stack(self, stack: str) -> Self:
        """Returns the table of a stack: its rows replace the model's rows with the same name.

        `encoder.M` replaces M, but neither `weights.M` nor m. A stack without rows uses the whole
        model's table.
        """
        stacks = self.stacks
        if stack not in stacks:
            return self

        # First the whole model's rows, then the stack's rows, without its name.
        prefix = f"{stack}."
        rows = {key: axis for key, axis in self.table if key.split(".")[0] not in stacks}
        for key, axis in self.table:
            if key.startswith(prefix):
                rows[key.removeprefix(prefix)] = axis
        return dataclasses.replace(self, table=tuple(sorted(rows.items())))

    def axes(self, dims: str) -> tuple[Axis | None, ...]:
        """Returns the mesh axis of each dim: each letter in turn takes its free axes.

        With {"G": ("x", "y"), "E": "y"}, GECM is split along G alone, by both axes; EGCM is split
        along E by y and along G by x. With {"B": "x", "M": "y", "weights.M": "x"}, BM is split by x
        and y, but the weight MH along M by x.
        """
        table = dict(self.table)
        of_weight = is_weight(dims)
        taken: set[str] = set()
        axes: list[Axis | None] = []
        for letter in dims:
            # An axis can split only one dim of a tensor: the first dim that names it.
            names = names_of([_axis(table, letter, of_weight)])
            free = tuple(name for name in names if name not in taken)
            taken.update(free)

            if not free:
                axes.append(None)
            elif len(free) == 1:
                axes.append(free[0])
            else:
                axes.append(free)
        return tuple(axes)

    def axes_of(self, spec: TensorSpec) -> tuple[Axis | None, ...]:
        """Returns the mesh axis of each dim of a tensor, according to its stack's table."""
        return self.in_stack(spec.stack).axes(spec.dims)

    def factor(self, dims: str) -> tuple[int, ...]:
        """Returns the number of parts that each dim is split into."""
        return tuple(map(self.mesh.size, self.axes(dims)))

    def shard_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Returns the shape of one partition's part; an uneven dim is rounded up."""
        factors = map(self.mesh.size, self.axes_of(spec))
        return tuple(-(-size // factor) for size, factor in zip(spec.shape, factors, strict=True))


def _axis(table: Mapping[str, Axis], letter: str, of_weight: bool) -> Axis | None:
    """Returns a letter's axis, for a weight's dim or any other, from the first matching row.

    A lowercase letter uses its own row, or else the weights' row, or else its capital's row. A
    weight's dim uses the weights' row or else its letter's. U uses its own row or else B's.
    """
    capital = letter.upper()
    keys = [letter] if letter.islower() else []
    if of_weight:
        keys.append(f"{_WEIGHTS}.{capital}")
    keys.append(capital)
    if letter == "U":
        keys.append("B")

    rows = [table[key] for key in keys if key in table]
    return rows[0] if rows else None
