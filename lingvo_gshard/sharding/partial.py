"""Partial results: an einsum's sum over a split dim, kept as terms until the sum is needed.

In section 3.3.2, the partitions' terms are added as soon as a contracting dim is split (Figure 4b).
Operations that are linear in the sum can instead be applied to each term, and the sum can be taken
once, at the end. This is the state P of OneFlow's SBP (split, broadcast, partial), from "How to Go
beyond Data Parallelism and Model Parallelism: Starting from GShard"; states.py has its signatures.
The terms are a tensor with one more dim, P, split along the mesh axis. The compiler partitions it
and its gradient like any other.

Letters are dims of the logical tensors, as in the table; P counts the terms.
"""

from __future__ import annotations

import dataclasses
import string

from lingvo_gshard.core.late import tf
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning
from xla_spmd.mesh import Axis, names_of


@dataclasses.dataclass(frozen=True)
class Partial:
    """A sum over the partitions of a mesh axis that is not yet computed.

    Sums can be added to each other, and multiplied by tensors that are whole along the axis,
    without communication; `reduce` computes them. All operations have gradients. Like annotations,
    they need a traced function.

    A tf.while_loop carries a sum as its `terms`.
    """

    terms: tf.Tensor  # [P, ...], one term for each partition along `axis`.
    dims: str  # The letters of the sum, without P.
    axis: Axis  # The mesh axis, or several axes, over whose partitions the terms are added.
    partitioning: Partitioning  # The mesh, and the table that splits the other dims.

    @staticmethod
    def from_einsum(
        partitioning: Partitioning, equation: str, a: tf.Tensor, b: tf.Tensor, *, letter: str
    ) -> Partial:
        """Returns tf.einsum(equation, a, b) without the sum over the partitions of `letter`.

        `letter` is a contracting dim of any size; the table gives its axis. This needs no
        communication. Raises ValueError if the equation does not have two operands or does not
        contract `letter`, if the table does not split it, if a shape is not static or does not fit
        the equation, or if the operands' sizes of `letter` differ.
        """
        what = "Partial.from_einsum"
        left, right, result = _operands(what, equation)
        if letter not in left or letter not in right or letter in result:
            raise ValueError(f"{what}: {equation!r} does not contract {letter!r}.")
        axis = dict(partitioning.table).get(letter)
        if not axis:
            raise ValueError(
                f"{what}: {equation!r}: the table {dict(partitioning.table)} does not split "
                f"{letter!r}."
            )

        # Padding could make different sizes equal.
        sizes = [_size(a, left, letter), _size(b, right, letter)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{what}: {equation!r}: {letter!r} is of sizes {sizes}.")

        # Each partition multiplies its own part of the contracting dim.
        p = _free_letter(equation)
        a_terms = _divide(a, left, letter, axis, partitioning)
        b_terms = _divide(b, right, letter, axis, partitioning)
        terms = tf.einsum(f"{p}{left},{p}{right}->{p}{result}", a_terms, b_terms)
        return Partial.from_terms(partitioning, terms, result, axis)

    @staticmethod
    def from_whole(partitioning: Partitioning, tensor: tf.Tensor, dims: str, axis: Axis) -> Partial:
        """Returns a tensor with these dims, whole along `axis`, as a sum.

        Its first term is the tensor, and all others are zero, so that it can be added to another
        sum. Raises ValueError if the rank is not len(dims), or if the mesh lacks the axis.
        """
        expected = f"dims {dims!r} name {len(dims)}"
        annotate.check_rank("Partial.from_whole", tensor, len(dims), expected)
        is_first_P = tf.one_hot(0, partitioning.mesh.size(axis), dtype=tensor.dtype)
        terms = tf.tensordot(is_first_P, tensor, axes=0)
        return Partial.from_terms(partitioning, terms, dims, axis)

    @staticmethod
    def from_terms(partitioning: Partitioning, terms: tf.Tensor, dims: str, axis: Axis) -> Partial:
        """Returns the sum of terms [P, ...], for example after a loop has carried them.

        `dims` are the sum's dims. Raises ValueError unless there is one term for each partition
        along `axis`, and one letter for each of the other dims.
        """
        num_terms = partitioning.mesh.size(axis)
        expected = f"terms of dims {dims!r} have {len(dims) + 1}"
        annotate.check_rank("Partial.from_terms", terms, len(dims) + 1, expected)
        if terms.shape[0] != num_terms:
            raise ValueError(
                f"Partial.from_terms: {terms.name} has shape {terms.shape}; expected {num_terms} "
                f"terms, one for each partition along {axis!r}."
            )

        axes = [axis, *_axes_without(partitioning, dims, axis)]
        split_terms = annotate.mesh_split(terms, partitioning.mesh.grid, axes)
        return Partial(split_terms, dims, axis, partitioning)

    def __add__(self, other: Partial) -> Partial:
        """Returns the sum of both, not yet computed.

        Raises ValueError if their dims or axes differ.
        """
        if (self.dims, self.axis) != (other.dims, other.axis):
            raise ValueError(
                f"Partial: {self.dims!r} over axis {self.axis!r} can't be added to "
                f"{other.dims!r} over axis {other.axis!r}."
            )
        terms = self.terms + other.terms
        return Partial.from_terms(self.partitioning, terms, self.dims, self.axis)

    def einsum(self, equation: str, other: tf.Tensor) -> Partial:
        """Returns tf.einsum(equation, sum, other), not yet computed.

        `other` is the same for every term, so it must be whole along the axis. Raises ValueError if
        the equation does not have two operands, or if the first operand's dims differ from the
        sum's.
        """
        left, right, result = _operands("Partial.einsum", equation)
        if left != self.dims:
            raise ValueError(
                f"Partial.einsum: {equation!r} begins with {left!r}, but the partial result has "
                f"dims {self.dims!r}."
            )

        axes = _axes_without(self.partitioning, right, self.axis)
        whole = annotate.mesh_split(other, self.partitioning.mesh.grid, axes)
        p = _free_letter(equation)
        terms = tf.einsum(f"{p}{left},{right}->{p}{result}", self.terms, whole)
        return Partial.from_terms(self.partitioning, terms, result, self.axis)

    def reduce(self, split: str | None = None) -> tf.Tensor:
        """Returns the sum, whole along the axis or with the dim `split` split over it.

        A whole sum is one all-reduce. A split sum is one reduce-scatter on GPUs, and on TPUs along
        one axis of several; otherwise the compiler makes an all-reduce and a slice. Raises
        ValueError if `split` is not a dim of the sum.
        """
        axes = _axes_without(self.partitioning, self.dims, self.axis)
        if split is not None:
            if split not in self.dims:
                raise ValueError(f"Partial.reduce: {self.dims!r} has no dim {split!r} to split.")
            index = self.dims.index(split)
            axes[index] = tuple(names_of([axes[index], self.axis]))
        return annotate.mesh_split(tf.reduce_sum(self.terms, 0), self.partitioning.mesh.grid, axes)


def _size(tensor: tf.Tensor, dims: str, letter: str) -> int:
    """Returns a tensor's size along `letter`.

    Raises ValueError if its shape is not static or does not fit `dims`.
    """
    annotate.check_in_graph("Partial.from_einsum", tensor)
    if not tensor.shape.is_fully_defined() or tensor.shape.rank != len(dims):
        raise ValueError(
            f"Partial.from_einsum: {tensor.name} has shape {tensor.shape}; a static shape of dims "
            f"{dims!r} is expected."
        )
    return tensor.shape.as_list()[dims.index(letter)]


def _divide(
    tensor: tf.Tensor, dims: str, letter: str, axis: Axis, partitioning: Partitioning
) -> tf.Tensor:
    """Returns [..., K, ...] as [P, ..., ceil(K / P), ...], each partition's own part of K."""
    num_parts = partitioning.mesh.size(axis)
    index = dims.index(letter)
    shape = tensor.shape.as_list()
    part_size = -(-shape[index] // num_parts)

    # Zeros add nothing to a sum over K.
    pads = [[0, 0] for _ in shape]
    pads[index][1] = part_size * num_parts - shape[index]
    axes = _axes_without(partitioning, dims, axis)
    axes[index] = axis
    padded = annotate.mesh_split(tf.pad(tensor, pads), partitioning.mesh.grid, axes)

    # [..., P, K / P, ...], then P first: each part stays on its partition.
    divided = tf.reshape(padded, [*shape[:index], num_parts, part_size, *shape[index + 1 :]])
    order = [index, *range(index), *range(index + 1, len(shape) + 1)]
    return Partial.from_terms(partitioning, tf.transpose(divided, order), dims, axis).terms


def _axes_without(partitioning: Partitioning, dims: str, axis: Axis) -> list[Axis | None]:
    """Returns the mesh axes of `dims`, without the terms' axes."""
    terms_names = names_of([axis])
    axes: list[Axis | None] = []
    for dim_axis in partitioning.axes(dims):
        names = [name for name in names_of([dim_axis]) if name not in terms_names]
        axes.append(tuple(names) or None)
    return axes


def _operands(what: str, equation: str) -> tuple[str, str, str]:
    """Returns the dims of both operands and of the result.

    Raises ValueError, prefixed by `what`, if the equation does not have two operands.
    """
    operands, arrow, result = equation.partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or not (left + right + result).isalpha():
        raise ValueError(f"{what}: expected an equation like 'BH,HM->BM', got {equation!r}.")
    return left, right, result


def _free_letter(equation: str) -> str:
    return next(letter for letter in string.ascii_letters if letter not in equation)
