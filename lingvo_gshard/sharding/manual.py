"""Manual partitioning inside an automatically partitioned program (section 3.2 of the paper).

Between `auto_to_manual_spmd_partition` and `manual_to_auto_spmd_partition`, code is written for one
partition: it sees this partition's parts of the tensors, and the compiler adds no communication.

Gradients are the whole computation's. If every partition reads a whole copy of a tensor, its
gradient is the sum over the copies; if equal copies leave as one tensor, they share its gradient.
Therefore every tensor that the code uses must have entered the region or be constant.

A region may hold any operation except an annotation. The compiler may compute equal operations of
several regions only once. For a sum over partitions, give the terms a new dimension
(`tf.expand_dims(y, 0)`) that leaves along their axis, and reduce it outside.

It may hold loops, in which each partition runs its own number of trips. A loop outside must not
carry a part: convert it to the whole first. Annotator.locally does so for the gradient of a loop,
because its gradient computes the region again.

The functions raise ValueError for code that breaks these rules, for dynamic shapes, and for axes
that do not fit a tensor.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Callable

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla_sharding
from lingvo_gshard.sharding import annotate
from xla_spmd.mesh import Axes, Mesh, names_of

# The operations at the borders of a region.
_ENTRY = "XlaSpmdFullToShardShape"
_EXIT = "XlaSpmdShardToFullShape"


def auto_to_manual_spmd_partition(tensor: tf.Tensor, mesh: Mesh, axes: Axes) -> tf.Tensor:
    """Begins manual partitioning: converts a whole tensor to this partition's part.

    Dimension i is split along axes[i], which must divide its size, or is whole if axes[i] is None.
    Along all other axes, every partition gets a copy.
    """
    what = "auto_to_manual_spmd_partition"
    annotate.check_axes(what, tensor, mesh, axes)
    shape = annotate.static_shape(f"{what}: {tensor.name}", tensor.shape)

    # Manual code could not distinguish an uneven part's padding from its data.
    factors = list(map(mesh.size, axes))
    for i, (size, factor) in enumerate(zip(shape, factors, strict=True)):
        if size % factor:
            raise ValueError(
                f"{what}: {tensor.name} of shape {tensor.shape}: dimension {i} of size {size} is "
                f"not divisible by the {factor} partitions of mesh axis {axes[i]!r}."
            )

    if mesh.num_partitions == 1:
        return tf.identity(tensor)

    # New dimensions, split along the other axes, hold one copy for each partition. The copies are
    # made without communication, and their gradient is the sum over them.
    copied = _copied(mesh, axes)
    copies = tf.broadcast_to(tensor, [*map(mesh.size, copied), *shape])
    all_axes = [*copied, *axes]
    split = annotate.mesh_split(copies, mesh, all_axes)
    part = xla_sharding.auto_to_manual_spmd_partition(split, _proto(mesh, all_axes))

    # Drop the new dimensions, which have size 1 in a partition's part.
    part_shape = [size // factor for size, factor in zip(shape, factors, strict=True)]
    return tf.reshape(part, part_shape)


def manual_to_auto_spmd_partition(part: tf.Tensor, mesh: Mesh, axes: Axes) -> tf.Tensor:
    """Ends manual partitioning: converts this partition's part to the whole tensor.

    The parts of dimension i are split along axes[i]; None means a whole dimension. Along all other
    axes, the parts must be equal.
    """
    what = "manual_to_auto_spmd_partition"
    annotate.check_axes(what, part, mesh, axes)
    shape = annotate.static_shape(f"{what}: {part.name}", part.shape)
    if mesh.num_partitions == 1:
        return tf.identity(part)
    _check_operations(part)

    # The partitions along the other axes hold equal copies, which leave as one tensor.
    num_copies = math.prod(map(mesh.size, _copied(mesh, axes)))
    part = _share_gradient(part, num_copies)

    factors = map(mesh.size, axes)
    whole_shape = [size * factor for size, factor in zip(shape, factors, strict=True)]
    whole = xla_sharding.manual_to_auto_spmd_partition(part, _proto(mesh, axes), whole_shape)
    return annotate.mesh_split(whole, mesh, axes)


def _share_gradient(part: tf.Tensor, num_copies: int) -> tf.Tensor:
    """Returns `part`, with its gradient divided among the copies that leave as one tensor."""
    if num_copies == 1:
        return part

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda d_y: d_y / num_copies

    return same(part)


def _proto(mesh: Mesh, axes: Axes) -> bytes:
    """Returns a sharding in the conversions' format, a serialized OpSharding."""
    return annotate.mesh_sharding(mesh, axes).proto.SerializeToString()


def _copied(mesh: Mesh, axes: Axes) -> list[str]:
    """Returns the mesh axes that do not split a tensor."""
    return [name for name in mesh.axis_names if name not in names_of(axes)]


def _check_operations(part: tf.Tensor) -> None:
    """Raises ValueError if `part` does not follow the rules of a manual region."""
    what = f"manual_to_auto_spmd_partition: {part.name}: "

    # The names of operations whose operands have entered the region, and of operations on constants
    # alone. All other operations are outside.
    inside: set[str] = set()
    constant: set[str] = set()
    for op in _upstream(part.op):
        inputs = {tensor.op.name for tensor in op.inputs}
        if op.type == _ENTRY:
            inside.add(op.name)
        elif op.type == "Const" or (inputs and inputs <= constant):
            constant.add(op.name)
        elif op.type != _EXIT and inputs & inside:
            _check_inside(what, op, inside | constant)
            inside.add(op.name)

    if part.op.name not in inside | constant:
        raise ValueError(f"{what}it has not entered the manual region.")


def _check_inside(what: str, op: tf.Operation, allowed: set[str]) -> None:
    """Raises ValueError, prefixed by `what`, if `op` is not allowed in a manual region.

    `allowed` are the names of the operations whose results it may use.
    """
    if op.type == "XlaSharding":
        raise ValueError(f"{what}the annotation {op.name} is not allowed in a region.")

    for tensor in op.inputs:
        if tensor.op.name not in allowed:
            raise ValueError(
                f"{what}{op.name} computes with {tensor.name} of shape {tensor.shape}, "
                "which has not entered the manual region."
            )


def _upstream(op: tf.Operation) -> list[tf.Operation]:
    """Returns `op` and all operations before it, up to the borders of regions; inputs first."""
    inputs: dict[tf.Operation, list[tf.Operation]] = {}
    waiting = [op]
    while waiting:
        top = waiting.pop()
        if top in inputs:
            continue

        is_border = top.type in (_ENTRY, _EXIT)
        inputs[top] = [] if is_border else [tensor.op for tensor in top.inputs]
        waiting += inputs[top]
    return list(graphlib.TopologicalSorter(inputs).static_order())
