"""The paper's annotation API (sections 3.2 and A.3) on TensorFlow's own XlaSharding op.

Each function returns the tensor with an annotation; logical shapes never change. The gradient gets
the same annotation. Annotations are never dropped: one CPU runs the same program as 2048 cores.

All tensors must belong to a traced function, since an eager value has no partitions. The functions
raise ValueError for an eager value and for an annotation that does not fit the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla_sharding
from lingvo_gshard.sharding.mesh import Axes, Mesh, names_of


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Annotates `tensor` as whole on every partition."""
    check_in_graph("replicate", tensor)
    return xla_sharding.replicate(tensor, use_sharding_op=True)


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Annotates `tensor` as split along one dimension, slice i on device i.

    `num_partitions` must be 1 or the number of the program's devices.
    """
    check_in_graph("split", tensor)
    rank = tensor.shape.rank
    if rank is None:
        raise ValueError(f"split: {tensor.name} has no static rank.")
    if not -rank <= split_dimension < rank:
        raise ValueError(
            f"split: dimension {split_dimension} of {tensor.name} of shape {tensor.shape} "
            f"does not exist; expected {-rank} to {rank - 1}."
        )

    if num_partitions < 1:
        raise ValueError(f"split: num_partitions must be 1 or more, got {num_partitions}.")
    # A grid of devices that has more than one of them along the split dimension alone.
    grid = [1] * rank
    grid[split_dimension] = num_partitions
    return shard(tensor, np.arange(num_partitions).reshape(grid))


def shard(tensor: tf.Tensor, device_assignment: Sequence | np.ndarray) -> tf.Tensor:
    """Annotates `tensor` as split over the grid `device_assignment` (appendix A.3).

    The grid has the tensor's rank and holds the device of each slice: 0 alone, or a permutation of
    the numbers of all devices of the program. A [3, 16, 64] tensor with an assignment of shape
    [1, 2, 4] has partitions of shape [3, 8, 16].
    """
    devices = np.asarray(device_assignment)
    expected = f"the device assignment has shape {devices.shape}, rank {devices.ndim}"
    check_rank("shard", tensor, devices.ndim, expected)
    if sorted(devices.flat) != list(range(devices.size)):
        raise ValueError(
            f"shard: the device assignment of {tensor.name} must hold 0 to {devices.size - 1} "
            f"once each, got {devices.ravel().tolist()}."
        )

    # A single slice is the whole, for which XLA has another annotation.
    if devices.size == 1:
        return replicate(tensor)
    return xla_sharding.tile(tensor, devices, use_sharding_op=True)


def mesh_split(tensor: tf.Tensor, mesh: Mesh, axes: Axes) -> tf.Tensor:
    """Annotates dimension i of `tensor` as split along axes[i], or as whole if that is None."""
    check_axes("mesh_split", tensor, mesh, axes)
    return mesh_sharding(mesh, axes).apply_to_tensor(tensor, use_sharding_op=True)


def check_in_graph(what: str, tensor: tf.Tensor) -> None:
    """Raises a ValueError, prefixed by `what`, if `tensor` is an eager value."""
    if not tf.is_symbolic_tensor(tensor):
        raise ValueError(
            f"{what}: a tensor inside a tf.function is expected, got a value of shape "
            f"{tensor.shape}."
        )


def check_rank(what: str, tensor: tf.Tensor, rank: int, expected: str) -> None:
    """Raises a ValueError, prefixed by `what`, for an eager value or a rank other than `rank`.

    `expected` says why the rank should be that, such as "dims 'BLM' name 3".
    """
    check_in_graph(what, tensor)
    if tensor.shape.rank != rank:
        raise ValueError(
            f"{what}: {tensor.name} has shape {tensor.shape}, rank {tensor.shape.rank}, "
            f"but {expected}."
        )


def static_shape(what: str, shape: tf.TensorShape) -> tuple[int, ...]:
    """Returns the sizes of `shape`; ValueError, prefixed by `what`, if one is not static."""
    if not shape.is_fully_defined():
        raise ValueError(f"{what} has shape {shape}; a static shape is expected.")
    return tuple(shape.as_list())


def check_axes(what: str, tensor: tf.Tensor, mesh: Mesh, axes: Axes) -> None:
    """Raises a ValueError, prefixed by `what`, if `axes` don't fit the tensor or the mesh.

    That is the case for an eager value, for another rank, and for unknown or repeated axes.
    """
    check_rank(what, tensor, len(axes), f"{len(axes)} axes {tuple(axes)} were given")
    mesh.check(f"{what}: {tensor.name} of shape {tensor.shape}", names_of(axes))


def mesh_sharding(mesh: Mesh, axes: Axes) -> xla_sharding.Sharding:
    """Returns the sharding that splits dimension i along axes[i], or leaves it whole if None.

    On a mesh of x:2 and y:3, a matrix with axes ["y", None] is split into a grid of [3, 1] slices,
    each of which lies on 2 devices.
    """
    grid = list(map(mesh.size, axes))
    if math.prod(grid) == 1:
        return xla_sharding.Sharding.replicate()

    # The mesh's axes that split the tensor come first, in the order of the tensor's dimensions.
    devices = np.array(mesh.devices).reshape(mesh.axis_sizes)
    order = [mesh.axis_names.index(name) for name in names_of(axes)]
    grouped = np.moveaxis(devices, order, range(len(order)))
    if math.prod(grid) == mesh.num_partitions:
        return xla_sharding.Sharding.tile(grouped.reshape(grid))

    # Devices along the other axes, which a last dimension of the grid lists, hold equal slices.
    return xla_sharding.Sharding.partial_tile(grouped.reshape([*grid, -1]))
