"""Manual partitioning inside an automatically partitioned program (section 3.2 of the paper).

Between `auto_to_manual_spmd_partition` and `manual_to_auto_spmd_partition` the code is that of one
partition: it sees the parts, of the parts' shapes, and the compiler adds no communication.

Gradients are those of the whole computation: what every partition read whole sums the gradients
of all partitions' copies, and copies that leave as one tensor share its gradient.

Products, gathers, scatters and elementwise operations may stand between the two. Reductions,
pads and slices (whose gradients are pads) may not: XLA takes their scalar zero and that of the
automatic part for one constant of two shardings, and its propagation ends the process. Sum with a
product instead (`tf.einsum("b,bh->h", ones, x)`), or leave with `sum_axes`. The gradient of a
broadcasting operation is such a reduction too: write it as an einsum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding

from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of
from lingvo_gshard.sharding.partitioning import Partitioning

Axes = Sequence[Axis | None]

_ENTRY = "XlaSpmdFullToShardShape"
# fmt: off
_REDUCTIONS_AND_PADS = frozenset([
    "All", "Any", "ArgMax", "ArgMin", "AvgPool", "Cumprod", "Cumsum", "LogSoftmax", "Max",
    "MaxPool", "Mean", "Min", "Pad", "PadV2", "Prod", "Softmax", "StridedSlice", "Sum",
])
# fmt: on


def auto_to_manual_spmd_partition(tensor: tf.Tensor, mesh: Mesh, axes: Axes) -> tf.Tensor:
    """Begins manual partitioning of `tensor`: from the whole to this partition's part.

    Args:
      tensor: of static shape and rank R.
      mesh: the devices.
      axes: R mesh axes, dimension i being split along axes[i], whole where None. Along the
        mesh's other axes every partition gets a copy.

    Returns:
      The part: dimension i is divided by the size of axes[i].

    Raises:
      ValueError: the ranks differ, an axis is unknown or used twice, a size is not static or is
        not divisible by its axis' size.
    """
    shape = _static_shape("auto_to_manual_spmd_partition", tensor)
    part_shape = _part_shape(tensor, shape, mesh, axes)
    if mesh.num_partitions == 1:
        return tf.identity(tensor)
    # A copy for each partition is a new dimension split along the axis: made with no
    # communication, and its gradient is the sum over all copies.
    rest = _other_axes(mesh, axes)
    copies = tf.broadcast_to(tensor, [*(mesh.size(axis) for axis in rest), *shape])
    all_axes = [*rest, *axes]
    part = xla_sharding.auto_to_manual_spmd_partition(
        annotate.mesh_split(copies, mesh, all_axes), _proto(mesh, all_axes)
    )
    return tf.reshape(part, part_shape)


def manual_to_auto_spmd_partition(
    part: tf.Tensor, mesh: Mesh, axes: Axes, *, sum_axes: Sequence[str] = ()
) -> tf.Tensor:
    """Ends manual partitioning: from this partition's part to the whole tensor.

    Args:
      part: of static shape and rank R.
      mesh: the devices.
      axes: R mesh axes, the parts of dimension i lying along axes[i], whole where None.
      sum_axes: mesh axes along which the parts are terms of a sum, which is computed here with
        one all-reduce. Along the axes named nowhere, parts must be equal: one is taken for all.

    Returns:
      The tensor: dimension i is multiplied by the size of axes[i].

    Raises:
      ValueError: the ranks differ, an axis is unknown or used twice, a size is not static, or the
        part was made by a reduction or a pad.
    """
    shape = _static_shape("manual_to_auto_spmd_partition", part)
    annotate.check_axes("manual_to_auto_spmd_partition", part, mesh, axes, sum_axes)
    if mesh.num_partitions == 1:
        return tf.identity(part)
    _check_operations(part)
    terms_axes = [*sum_axes, *axes]
    terms = tf.reshape(part, [*(1 for _ in sum_axes), *shape])
    full_shape = [
        size * (1 if axis is None else mesh.size(axis))
        for size, axis in zip(terms.shape.as_list(), terms_axes, strict=True)
    ]
    num_copies = 1
    for axis in _other_axes(mesh, terms_axes):
        num_copies *= mesh.size(axis)
    whole = xla_sharding.manual_to_auto_spmd_partition(
        _share_gradient(terms, num_copies), _proto(mesh, terms_axes), full_shape
    )
    whole = annotate.mesh_split(whole, mesh, terms_axes)
    if not sum_axes:
        return whole
    return annotate.mesh_split(tf.reduce_sum(whole, list(range(len(sum_axes)))), mesh, axes)


class Region:
    """Enters and leaves manual partitioning by the letters of a table; see `region`."""

    def __init__(self, partitioning: Partitioning) -> None:
        """A region over the mesh of `partitioning`, entered with its letters."""
        self._partitioning = partitioning
        # As in Partitioning.annotate: partitions count in the order of the grid.
        mesh = partitioning.mesh
        self._mesh = Mesh(mesh.axis_names, mesh.axis_sizes)
        self._open = True

    def enter(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """This partition's part of a tensor of `dims`; ValueError as the function, or if closed."""
        self._check_open("enter", tensor)
        return auto_to_manual_spmd_partition(tensor, self._mesh, self._partitioning.axes(dims))

    def leave(self, part: tf.Tensor, dims: str, *, sum_axes: Sequence[str] = ()) -> tf.Tensor:
        """The whole tensor of `dims`; ValueError as the function, or if closed."""
        self._check_open("leave", part)
        axes = self._partitioning.axes(dims)
        return manual_to_auto_spmd_partition(part, self._mesh, axes, sum_axes=sum_axes)

    def close(self) -> None:
        """Ends the region: nothing enters or leaves any more."""
        self._open = False

    def _check_open(self, what: str, tensor: tf.Tensor) -> None:
        if not self._open:
            raise ValueError(f"{what}: the manual region has ended before {tensor.name}.")


@contextlib.contextmanager
def region(partitioning: Partitioning) -> Iterator[Region]:
    """A manual region: `with manual.region(p) as r: y = r.leave(f(r.enter(x, "GSM")), "GSM")`."""
    made = Region(partitioning)
    try:
        yield made
    finally:
        made.close()


def _share_gradient(part: tf.Tensor, num_copies: int) -> tf.Tensor:
    """`part` itself; its gradient is divided among the copies that leave as one tensor."""
    if num_copies == 1:
        return part

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda d_y: d_y / num_copies

    return same(part)


def _proto(mesh: Mesh, axes: Axes) -> bytes:
    return annotate.mesh_sharding(mesh, axes).proto.SerializeToString()


def _other_axes(mesh: Mesh, axes: Axes) -> list[str]:
    return [name for name in mesh.axis_names if name not in names_of(axes)]


def _static_shape(what: str, tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"{what}: {tensor.name} has shape {tensor.shape}; a static shape is expected."
        )
    return tensor.shape.as_list()


def _check_operations(part: tf.Tensor) -> None:
    """ValueError if a reduction or a pad stands between the region's begin and `part`."""
    seen: dict[str, bool] = {}  # Whether the operation's inputs lead back to the region's begin.

    def inside(op: tf.Operation) -> bool:
        if op.name not in seen:
            seen[op.name] = op.type == _ENTRY
            if op.type != _ENTRY:
                seen[op.name] = any([inside(tensor.op) for tensor in op.inputs])
            if seen[op.name] and op.type in _REDUCTIONS_AND_PADS:
                raise ValueError(
                    f"manual_to_auto_spmd_partition: {part.name}: the {op.type} {op.name} may not "
                    f"stand in a manual region; use an einsum, or sum_axes on leaving."
                )
        return seen[op.name]

    inside(part.op)


def _part_shape(tensor: tf.Tensor, shape: list[int], mesh: Mesh, axes: Axes) -> list[int]:
    what = "auto_to_manual_spmd_partition"
    annotate.check_axes(what, tensor, mesh, axes)
    for i, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        # Manual code could not tell the padding of an uneven part from its data.
        if axis is not None and size % mesh.size(axis):
            raise ValueError(
                f"{what}: {tensor.name} of shape {tensor.shape}: dimension {i} of size {size} is "
                f"not divisible by the {mesh.size(axis)} partitions of mesh axis {axis!r}."
            )
    return [
        size // (1 if axis is None else mesh.size(axis))
        for size, axis in zip(shape, axes, strict=True)
    ]
