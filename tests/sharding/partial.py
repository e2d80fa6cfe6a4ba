"""Partial results: an einsum's sum over a split dim, kept as terms until it is needed.

In section 3.3.2 the partitions' terms are added as soon as a contracting dim is split (figure 4b).
Operations that are linear in the sum can be applied to each term instead, and the sum be taken once
at the end: the state P of OneFlow's SBP (split, broadcast, partial). The terms are a tensor with
one more dimension, P, split along the mesh axis; the compiler partitions it and its gradient like
any other.

Letters are dims of the logical tensors, as in the table; P counts the terms.
"""

from __future__ import annotations

import dataclasses
import string

import tensorflow as tf

from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, names_of


@dataclasses.dataclass(frozen=True)
class Partial:
    """A sum over the partitions of one mesh axis, not yet computed.

    Attributes:
      terms: [P, ...], one term for each partition along `axis`.
      dims: the letters of the sum, without P.
      axis: the mesh axis.
      partitioning: the mesh, and the table that splits the other dims.
    """

    terms: tf.Tensor
    dims: str
    axis: str
    partitioning: Partitioning

    def __add__(self, other: Partial) -> Partial:
        """The sum of both, not yet computed; ValueError if their dims or axes differ."""
        if (self.dims, self.axis) != (other.dims, other.axis):
            raise ValueError(
                f"Partial: {self.dims!r} over axis {self.axis!r} can't be added to "
                f"{other.dims!r} over axis {other.axis!r}."
            )
        return _partial(self.terms + other.terms, self.dims, self.axis, self.partitioning)

    def einsum(self, equation: str, other: tf.Tensor) -> Partial:
        """tf.einsum(equation, sum, other), not yet computed.

        `other` is the same for every term, and is therefore whole along the axis. Raises ValueError
        if the equation does not have two operands, or if the first has other dims.
        """
        left, right, out = _operands("Partial.einsum", equation)
        if left != self.dims:
            raise ValueError(
                f"Partial.einsum: {equation!r} begins with {left!r}, but the partial result has "
                f"dims {self.dims!r}."
            )
        p, axes = _free_letter(equation), _axes_without(self.partitioning, right, self.axis)
        whole = annotate.mesh_split(other, self.partitioning.mesh.grid, axes)
        terms = tf.einsum(f"{p}{left},{right}->{p}{out}", self.terms, whole)
        return _partial(terms, out, self.axis, self.partitioning)

    def reduce(self, split: str | None = None) -> tf.Tensor:
        """The sum, whole along the axis or with the dim `split` split over it.

        The former is one all-reduce. The latter is one reduce-scatter on GPUs, and on TPUs along
        one axis of several; else the compiler makes an all-reduce and a slice. Raises ValueError if
        the sum has no dim `split`.
        """
        axes = _axes_without(self.partitioning, self.dims, self.axis)
        if split is not None:
            if split not in self.dims:
                raise ValueError(f"Partial.reduce: {self.dims!r} has no dim {split!r} to split.")
            index = self.dims.index(split)
            axes[index] = (*names_of([axes[index]]), self.axis)
        return annotate.mesh_split(tf.reduce_sum(self.terms, 0), self.partitioning.mesh.grid, axes)


def einsum(
    partitioning: Partitioning, equation: str, a: tf.Tensor, b: tf.Tensor, *, letter: str
) -> Partial:
    """tf.einsum(equation, a, b) as terms: without the sum over the partitions of `letter`.

    `letter` is a contracting dim of any size; the table gives its axis. Raises ValueError if the
    equation does not have two operands or does not contract `letter`, if the table does not split
    it along one axis, if a shape is not static or does not fit the equation, or if the operands'
    sizes of `letter` differ.
    """
    left, right, out = _operands("partial.einsum", equation)
    if letter not in left or letter not in right or letter in out:
        raise ValueError(f"partial.einsum: {equation!r} does not contract {letter!r}.")
    axis = dict(partitioning.table).get(letter)
    if not isinstance(axis, str):
        raise ValueError(
            f"partial.einsum: {equation!r}: the table {dict(partitioning.table)} does not split "
            f"{letter!r} along one axis."
        )
    sizes = [_size(tensor, dims, letter) for tensor, dims in ((a, left), (b, right))]
    if sizes[0] != sizes[1]:  # Padding could make them equal.
        raise ValueError(f"partial.einsum: {equation!r}: {letter!r} is of sizes {sizes}.")
    p = _free_letter(equation)
    a = _divide(a, left, letter, axis, partitioning)
    b = _divide(b, right, letter, axis, partitioning)
    terms = tf.einsum(f"{p}{left},{p}{right}->{p}{out}", a, b)
    return _partial(terms, out, axis, partitioning)


def _size(tensor: tf.Tensor, dims: str, letter: str) -> int:
    annotate.check_in_graph("partial.einsum", tensor)
    if not tensor.shape.is_fully_defined() or tensor.shape.rank != len(dims):
        raise ValueError(
            f"partial.einsum: {tensor.name} has shape {tensor.shape}; a static one of dims "
            f"{dims!r} is expected."
        )
    return tensor.shape.as_list()[dims.index(letter)]


def _divide(
    tensor: tf.Tensor, dims: str, letter: str, axis: str, partitioning: Partitioning
) -> tf.Tensor:
    """[..., K, ...] -> [P, ..., ceil(K / P), ...], padded with zeros, without communication."""
    ways, index = partitioning.mesh.size(axis), dims.index(letter)
    shape = tensor.shape.as_list()
    part = -(-shape[index] // ways)
    pads = [[0, part * ways - size if i == index else 0] for i, size in enumerate(shape)]
    axes = _axes_without(partitioning, dims, axis)
    axes[index] = axis
    padded = annotate.mesh_split(tf.pad(tensor, pads), partitioning.mesh.grid, axes)
    divided = tf.reshape(padded, [*shape[:index], ways, part, *shape[index + 1 :]])
    order = [index, *range(index), *range(index + 1, len(shape) + 1)]
    return _partial(tf.transpose(divided, order), dims, axis, partitioning).terms


def _partial(terms: tf.Tensor, dims: str, axis: str, partitioning: Partitioning) -> Partial:
    axes = [axis, *_axes_without(partitioning, dims, axis)]
    split = annotate.mesh_split(terms, partitioning.mesh.grid, axes)
    return Partial(split, dims, axis, partitioning)


def _axes_without(partitioning: Partitioning, dims: str, axis: str) -> list[Axis | None]:
    """The mesh axes of `dims`, leaving out the terms' axis."""
    return [None if axis in names_of([found]) else found for found in partitioning.axes(dims)]


def _operands(what: str, equation: str) -> tuple[str, str, str]:
    operands, arrow, out = equation.partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or not (left + right + out).isalpha():
        raise ValueError(f"{what}: expected an equation like 'BH,HM->BM', got {equation!r}.")
    return left, right, out


def _free_letter(equation: str) -> str:
    return next(letter for letter in string.ascii_letters if letter not in equation)
