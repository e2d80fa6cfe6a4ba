"""Manual partitioning inside an automatically partitioned program (section 3.2 of the paper).

Between `auto_to_manual_spmd_partition` and `manual_to_auto_spmd_partition`, code is written for one
partition: it sees that partition's parts of the tensors, and the compiler adds no communication.
Either all axes of the mesh become manual, or only those that one dim lies along. In the second
case the compiler still partitions the code over the other axes, as it does elsewhere.

Gradients are those of the whole computation. If every partition reads a whole copy of a tensor, its
gradient is the sum over the copies; if equal copies leave as one tensor, they share its gradient.
Therefore every tensor that the code computes with must have entered the region or be constant.

A region may hold products, gathers, scatters and elementwise operations. If all axes are manual, it
must not hold reductions, pads or slices (whose gradients are pads): XLA merges their scalar zero
with that of the automatic part into one constant with two shardings, and then aborts the process.
Use a product (`tf.einsum("b,bh->h", ones, x)`) or `sum_axes` for a sum. The gradient of a
broadcasting operation is a reduction, too: write the operation as an einsum.

A region may also hold loops over tensors that have entered; each partition runs its own number of
iterations. Loop bodies may hold reductions, and are not checked.

The functions raise ValueError for what breaks these rules, for shapes that are not static, and for
axes that do not fit a tensor.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.compiler.xla.experimental import xla_sharding

from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of

Axes = Sequence[Axis | None]

_ENTRY, _EXIT = "XlaSpmdFullToShardShape", "XlaSpmdShardToFullShape"
_ANNOTATION = "XlaSharding"
# fmt: off
_REDUCTIONS_AND_PADS = frozenset([
    "All", "Any", "ArgMax", "ArgMin", "AvgPool", "Cumprod", "Cumsum", "LogSoftmax", "Max",
    "MaxPool", "Mean", "Min", "Pad", "PadV2", "Prod", "Softmax", "StridedSlice", "Sum",
])
# fmt: on


def auto_to_manual_spmd_partition(
    tensor: tf.Tensor, mesh: Mesh, axes: Axes, *, manual_axis: Axis | None = None
) -> tf.Tensor:
    """Begins manual partitioning: converts a whole tensor to this partition's part.

    Dimension i is split along axes[i], or whole if that is None. If the axis is manual, the size is
    divided by the axis's, and must be divisible by it. Along other manual axes, every partition
    gets a copy. `manual_axis`, which need not be among `axes`, is the only axis that becomes
    manual; None means all.
    """
    what = "auto_to_manual_spmd_partition"
    shape = _static_shape(what, tensor)
    more_axes = [] if manual_axis in axes else names_of([manual_axis])
    annotate.check_axes(what, tensor, mesh, axes, more_axes)
    ways = _ways(mesh, axes, manual_axis)
    for i, (size, way) in enumerate(zip(shape, ways, strict=True)):
        # Manual code could not distinguish an uneven part's padding from its data.
        if size % way:
            raise ValueError(
                f"{what}: {tensor.name} of shape {tensor.shape}: dimension {i} of size {size} is "
                f"not divisible by the {way} partitions of mesh axis {axes[i]!r}."
            )
    if _is_one_part(mesh, manual_axis):
        return tf.identity(tensor)
    # A new dimension, split along the axis, holds one copy for each partition. It is made without
    # communication, and its gradient is the sum over the copies.
    copied = _copied(mesh, axes, manual_axis)
    copies = tf.broadcast_to(tensor, [*(mesh.size(axis) for axis in copied), *shape])
    all_axes = [*copied, *axes]
    part = xla_sharding.auto_to_manual_spmd_partition(
        annotate.mesh_split(copies, mesh, all_axes),
        _proto(mesh, all_axes),
        single_dim=_manual_dim(all_axes, manual_axis),
    )
    return tf.reshape(part, [size // way for size, way in zip(shape, ways, strict=True)])


def manual_to_auto_spmd_partition(
    part: tf.Tensor,
    mesh: Mesh,
    axes: Axes,
    *,
    sum_axes: Sequence[str] = (),
    manual_axis: Axis | None = None,
) -> tf.Tensor:
    """Ends manual partitioning: converts this partition's part to the whole tensor.

    The parts of dimension i lie along axes[i]; None means a whole dimension. If the axis is manual,
    the size is multiplied by the axis's. Along `sum_axes`, which are manual, the parts are the
    terms of a sum, which is computed here with one all-reduce. Along manual axes in neither
    argument, the parts must be equal. `manual_axis` is as at the region's beginning; it is one of
    `axes`, or the only one of `sum_axes`.
    """
    what = "manual_to_auto_spmd_partition"
    shape = _static_shape(what, part)
    annotate.check_axes(what, part, mesh, axes, sum_axes)
    terms_axes = [*sum_axes, *axes]
    along = [*sum_axes, *(axis for axis in axes if axis == manual_axis)]
    if manual_axis is not None and along != [manual_axis]:
        raise ValueError(
            f"{what}: {part.name} of shape {part.shape}: in a region of {manual_axis!r} alone it "
            f"must lie along that axis or be summed over it; it lies along {tuple(axes)} and is "
            f"summed over {tuple(sum_axes)}."
        )
    if _is_one_part(mesh, manual_axis):
        return tf.identity(part)
    _check_operations(part, _REDUCTIONS_AND_PADS if manual_axis is None else frozenset())
    terms = tf.reshape(part, [*(1 for _ in sum_axes), *shape])
    ways = _ways(mesh, terms_axes, manual_axis)
    num_copies = math.prod(mesh.size(axis) for axis in _copied(mesh, terms_axes, manual_axis))
    whole = xla_sharding.manual_to_auto_spmd_partition(
        _share_gradient(terms, num_copies),
        _proto(mesh, terms_axes),
        [size * way for size, way in zip(terms.shape.as_list(), ways, strict=True)],
        single_dim=_manual_dim(terms_axes, manual_axis),
    )
    whole = annotate.mesh_split(whole, mesh, terms_axes)
    if not sum_axes:
        return whole
    return annotate.mesh_split(tf.reduce_sum(whole, list(range(len(sum_axes)))), mesh, axes)


@dataclasses.dataclass(frozen=True)
class Region:
    """Manual partitioning by a table's letters: `y = r.leave(f(r.enter(x, "GSM")), "GSM")`.

    `manual_axis` is the only manual axis; None means all.
    """

    partitioning: Partitioning
    manual_axis: Axis | None = None

    def enter(self, tensor: tf.Tensor, dims: str) -> tf.Tensor:
        """This partition's part of a tensor; see auto_to_manual_spmd_partition."""
        mesh, axes = self.partitioning.mesh.grid, self.partitioning.axes(dims)
        return auto_to_manual_spmd_partition(tensor, mesh, axes, manual_axis=self.manual_axis)

    def leave(self, part: tf.Tensor, dims: str, *, sum_axes: Sequence[str] = ()) -> tf.Tensor:
        """The whole tensor of a part; see manual_to_auto_spmd_partition."""
        mesh, axes = self.partitioning.mesh.grid, self.partitioning.axes(dims)
        return manual_to_auto_spmd_partition(
            part, mesh, axes, sum_axes=sum_axes, manual_axis=self.manual_axis
        )


def _share_gradient(part: tf.Tensor, num_copies: int) -> tf.Tensor:
    """Returns `part`, with its gradient divided among the copies that leave as one tensor."""
    if num_copies == 1:
        return part

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda d_y: d_y / num_copies

    return same(part)


def _proto(mesh: Mesh, axes: Axes) -> bytes:
    return annotate.mesh_sharding(mesh, axes).proto.SerializeToString()


def _copied(mesh: Mesh, axes: Axes, manual_axis: Axis | None) -> list[Axis]:
    """The manual axes that a tensor does not lie along."""
    if manual_axis is not None:
        return [] if manual_axis in axes else [manual_axis]
    return [name for name in mesh.axis_names if name not in names_of(axes)]


def _ways(mesh: Mesh, axes: Axes, manual_axis: Axis | None) -> list[int]:
    """How many manual parts each dimension has."""
    return [mesh.size(axis) if manual_axis in (None, axis) else 1 for axis in axes]


def _is_one_part(mesh: Mesh, manual_axis: Axis | None) -> bool:
    return (mesh.num_partitions if manual_axis is None else mesh.size(manual_axis)) == 1


def _manual_dim(axes: Axes, manual_axis: Axis | None) -> int:
    """The dimension that lies along the only manual axis; -1 if all axes are manual."""
    return -1 if manual_axis is None else axes.index(manual_axis)


def _static_shape(what: str, tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"{what}: {tensor.name} has shape {tensor.shape}; a static shape is expected."
        )
    return tensor.shape.as_list()


def _check_operations(part: tf.Tensor, refused: frozenset[str]) -> None:
    """Raises a ValueError if the region holds an operation that it must not hold."""
    what = f"manual_to_auto_spmd_partition: {part.name}: "
    inside, constant = set[str](), set[str]()
    for op in _upstream(part.op):
        inputs = {tensor.op.name for tensor in op.inputs}
        if op.type == _ENTRY:
            inside.add(op.name)
        elif op.type == "Const" or (inputs and inputs <= constant):
            constant.add(op.name)
        elif op.type != _EXIT and inputs & inside:
            inside.add(op.name)
            if op.type in refused:
                raise ValueError(
                    f"{what}the {op.type} {op.name} may not stand in a manual region; use an "
                    "einsum, or sum_axes on leaving."
                )
            if op.type == _ANNOTATION:
                raise ValueError(f"{what}the annotation {op.name} may not stand in a region.")
            for tensor in op.inputs:
                if tensor.op.name not in inside | constant:
                    raise ValueError(
                        f"{what}{op.name} computes with {tensor.name} of shape {tensor.shape}, "
                        "which has not entered the manual region."
                    )


def _upstream(op: tf.Operation) -> list[tf.Operation]:
    """`op` and its inputs, theirs, and so on, up to the borders of regions; inputs first."""
    ordered: dict[str, tf.Operation] = {}
    opened, stack = set[str](), [op]
    while stack:
        top = stack[-1]
        if top.name in opened:  # Its inputs are done.
            ordered.setdefault(stack.pop().name, top)
            continue
        opened.add(top.name)
        if top.type not in (_ENTRY, _EXIT):
            stack += [tensor.op for tensor in top.inputs if tensor.op.name not in opened]
    return list(ordered.values())
