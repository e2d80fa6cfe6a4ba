"""The dims of tensors in a traced graph, with letters if they are known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from lingvo_gshard.core.base_layer import STACKED, WeightSpec
from lingvo_gshard.sharding import layout

# Letters without a row in any table.
_UNNAMED = "_AFIJOPQWZ"


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dim, identified by its letter or, if that is unknown, by a number."""

    size: int
    letter: str
    number: int = 0


# The dims that an axis of a tensor merges, such as B and L.
Axis = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class Known:
    """The dims of a tensor, by axis, and the weight from which alone it was computed, if any."""

    axes: tuple[Axis, ...]
    weight: WeightSpec | None = None

    @property
    def has_rows(self) -> bool:
        """Whether one of the dims is a batch's, as in every activation."""
        letters = "".join(dim.letter for dim in dims_of(self.axes))
        return not layout.is_weight(letters)


class Letters:
    """The letters of the dims in one product; unknown ones become letters that no table splits."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._letters: dict[Dim, str] = {}
        self._unnamed = iter(_UNNAMED)

    def text(self, axes: Sequence[Axis]) -> str:
        """Returns the letters of a tensor with these axes."""
        return "".join(self._letter(dim) for dim in dims_of(axes))

    def _letter(self, dim: Dim) -> str:
        if dim not in self._letters:
            letter = dim.letter or next(self._unnamed)
            self._letters[dim] = letter
            self.sizes[letter] = dim.size
        return self._letters[dim]


def dims_of(axes: Sequence[Axis]) -> list[Dim]:
    """Returns the dims of all axes in order."""
    return [dim for axis in axes for dim in axis]


def size(axis: Axis) -> int:
    """Returns the number of elements along an axis."""
    return math.prod(dim.size for dim in axis)


def is_named(axis: Axis) -> bool:
    """Returns whether all dims of an axis have letters."""
    return all(dim.letter for dim in axis)


def only_weight(operands: Sequence[Known]) -> WeightSpec | None:
    """Returns the first weight, if all operands but scalars are weights."""
    tensors = [operand for operand in operands if operand.axes]
    if tensors and all(operand.weight for operand in tensors):
        return tensors[0].weight
    return None


def as_declared(axes: Sequence[Axis], weight: WeightSpec | None) -> Sequence[Axis]:
    """Returns the axes of a factor in the order of its declaration, if that names the same dims."""
    if weight is None:
        return axes
    dims = dims_of(axes)
    declared = weight.dims.removeprefix(STACKED)
    if sorted(dim.letter for dim in dims) != sorted(declared):
        return axes
    return [tuple(sorted(dims, key=lambda dim: declared.index(dim.letter)))]


def expanded(equation: str, ranks: Sequence[int]) -> list[str]:
    """Returns the labels of the operands and of the result, with one for each dim of `...`."""
    factors, _, result = equation.partition("->")
    texts = factors.split(",")
    counts = [rank - len(text.replace("...", "")) for rank, text in zip(ranks, texts, strict=True)]
    # Labels that no equation has.
    labels = "".join(chr(ord("0") + index) for index in range(max(counts)))

    operands = []
    for text, count in zip(texts, counts, strict=True):
        operands.append(text.replace("...", labels[len(labels) - count :]))
    return [*operands, result.replace("...", labels)]


def regrouped(sizes: Sequence[int], dims: Sequence[Dim]) -> Iterator[tuple[list[int], list[Dim]]]:
    """Yields the shortest runs of new sizes and of dims with the same number of elements."""
    remaining = list(dims)
    run: list[int] = []
    merged: list[Dim] = []
    for new_size in sizes:
        run.append(new_size)
        while remaining and size(tuple(merged)) < math.prod(run):
            merged.append(remaining.pop(0))
        if size(tuple(merged)) == math.prod(run):
            yield run, merged
            run = []
            merged = []
    if run:
        yield run, merged
