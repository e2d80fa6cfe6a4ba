"""The paper's annotation API (sections 3.2 and A.3) on TensorFlow's own XlaSharding op.

Each function returns the tensor with an annotation; the logical shape never changes. The gradient
gets the same annotation. Annotations are never dropped: one CPU runs the same program as 2048
cores.

A tensor may have fewer slices than the program has devices. The slices are then replicated over the
remaining devices.

All tensors must belong to a traced function, because an eager value cannot be partitioned. The
functions raise ValueError for an eager value, and for an annotation that does not fit the tensor or
the devices.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla_sharding
from xla_spmd.mesh import Axes, Mesh, names_of

# The number of devices of the program that is being traced; None if the mesh is unknown.
_NUM_DEVICES = contextvars.ContextVar[int | None]("num_devices", default=None)


@contextlib.contextmanager
def program_devices(num_devices: int) -> Iterator[None]:
    """Sets the number of devices of the program that is traced inside this context."""
    token = _NUM_DEVICES.set(num_devices)
    try:
        yield
    finally:
        _NUM_DEVICES.reset(token)


def replicate(tensor: tf.Tensor) -> tf.Tensor:
    """Annotates `tensor` as replicated: whole on every partition."""
    check_in_graph("replicate", tensor)
    return xla_sharding.replicate(tensor, use_sharding_op=True)


def split(tensor: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
    """Annotates `tensor` as split along one dimension, slice i on device i.

    `num_partitions`, n, must not exceed the number of the program's devices. If there are more
    devices, slice i is also on devices i + n, i + 2n, ...: with 4 slices on 8 devices, slice 1 is
    on devices 1 and 5. If n does not divide the number of devices, the number of slices is rounded
    up to a divisor: for n = 3 on 8 devices to 4, so that no device holds more than a third.
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
    num_devices = _NUM_DEVICES.get()
    if num_devices is not None:
        if num_partitions > num_devices:
            raise ValueError(
                f"split: {tensor.name} of shape {tensor.shape} has {num_partitions} slices, but "
                f"the program has {num_devices} devices; expected at most {num_devices}."
            )
        while num_devices % num_partitions:
            num_partitions += 1

    # A grid of devices whose only dim above 1 is the split dimension.
    grid = [1] * rank
    grid[split_dimension] = num_partitions
    return _tiled("split", tensor, np.arange(num_partitions).reshape(grid))


def shard(tensor: tf.Tensor, device_assignment: Sequence | np.ndarray) -> tf.Tensor:
    """Annotates `tensor` as split over the grid `device_assignment` (appendix A.3).

    The grid has the tensor's rank and holds the device of each slice: a permutation of 0 to n - 1
    for n slices. A [3, 16, 64] tensor with an assignment of shape [1, 2, 4] has partitions of shape
    [3, 8, 16]. n must divide the number of the program's devices. If there are more devices, the
    slice on device d is also on devices d + n, d + 2n, ...
    """
    devices = np.asarray(device_assignment)
    expected = f"the device assignment has shape {devices.shape}, rank {devices.ndim}"
    check_rank("shard", tensor, devices.ndim, expected)
    if sorted(devices.flat) != list(range(devices.size)):
        raise ValueError(
            f"shard: the device assignment of {tensor.name} must hold 0 to {devices.size - 1} "
            f"once each, got {devices.ravel().tolist()}."
        )
    return _tiled("shard", tensor, devices)


def _tiled(what: str, tensor: tf.Tensor, devices: np.ndarray) -> tf.Tensor:
    """Annotates `tensor` as split over a grid of devices, and replicated over the other devices.

    Raises ValueError, prefixed by `what`, if the slices do not divide the program's devices.
    """
    # A single slice is the whole tensor, which needs a different XLA annotation.
    num_slices = devices.size
    if num_slices == 1:
        return replicate(tensor)

    num_devices = _NUM_DEVICES.get()
    if num_devices is None:  # Traced without a mesh: assume one slice per device.
        num_devices = num_slices
    if num_devices % num_slices:
        raise ValueError(
            f"{what}: {tensor.name} of shape {tensor.shape} has {num_slices} slices, but the "
            f"program has {num_devices} devices; expected a divisor of {num_devices}."
        )

    if num_slices == num_devices:
        return xla_sharding.tile(tensor, devices, use_sharding_op=True)

    # The grid's last dimension lists the devices with equal slices.
    copies = num_slices * np.arange(num_devices // num_slices)
    sharding = xla_sharding.Sharding.partial_tile(devices[..., None] + copies)
    return sharding.apply_to_tensor(tensor, use_sharding_op=True)


def mesh_split(tensor: tf.Tensor, mesh: Mesh, axes: Axes) -> tf.Tensor:
    """Annotates dimension i of `tensor` as split along axes[i], or as whole if axes[i] is None."""
    check_axes("mesh_split", tensor, mesh, axes)
    return mesh_sharding(mesh, axes).apply_to_tensor(tensor, use_sharding_op=True)


def check_in_graph(what: str, tensor: tf.Tensor) -> None:
    """Raises ValueError, prefixed by `what`, if `tensor` is an eager value."""
    if not tf.is_symbolic_tensor(tensor):
        raise ValueError(
            f"{what}: a tensor inside a tf.function is expected, got a value of shape "
            f"{tensor.shape}."
        )


def check_rank(what: str, tensor: tf.Tensor, rank: int, expected: str) -> None:
    """Raises ValueError, prefixed by `what`, for an eager value, or unless its rank is `rank`.

    `expected` is the reason for this rank, for example "dims 'BLM' name 3".
    """
    check_in_graph(what, tensor)
    if tensor.shape.rank != rank:
        raise ValueError(
            f"{what}: {tensor.name} has shape {tensor.shape}, rank {tensor.shape.rank}, "
            f"but {expected}."
        )


def static_shape(what: str, shape: tf.TensorShape) -> tuple[int, ...]:
    """Returns the sizes of `shape`.

    Raises ValueError, prefixed by `what`, if a size is not static.
    """
    if not shape.is_fully_defined():
        raise ValueError(f"{what} has shape {shape}; a static shape is expected.")
    return tuple(shape.as_list())


def check_axes(what: str, tensor: tf.Tensor, mesh: Mesh, axes: Axes) -> None:
    """Raises ValueError, prefixed by `what`, if `axes` don't fit the tensor or the mesh.

    The conditions are an eager value, a rank that differs from the number of axes, unknown or
    repeated axes, and a mesh whose number of devices differs from the program's.
    """
    check_rank(what, tensor, len(axes), f"{len(axes)} axes {tuple(axes)} were given")
    description = f"{what}: {tensor.name} of shape {tensor.shape}"
    mesh.check(description, names_of(axes))

    num_devices = _NUM_DEVICES.get()
    if num_devices is not None and mesh.num_partitions != num_devices:
        raise ValueError(
            f"{description}: the mesh {mesh.shape} has {mesh.num_partitions} devices, but the "
            f"program has {num_devices}; expected a mesh of {num_devices}."
        )


def mesh_sharding(mesh: Mesh, axes: Axes) -> xla_sharding.Sharding:
    """Returns the sharding that splits dimension i along axes[i], or leaves it whole if None.

    On a mesh of x:2 and y:3, a matrix with axes ["y", None] is split into a grid of [3, 1] slices,
    each of which is on 2 devices.
    """
    grid = list(map(mesh.size, axes))
    if math.prod(grid) == 1:
        return xla_sharding.Sharding.replicate()

    # The mesh axes that split the tensor come first, in the order of the tensor's dimensions.
    devices = np.array(mesh.devices).reshape(mesh.axis_sizes)
    order = [mesh.axis_names.index(name) for name in names_of(axes)]
    grouped = np.moveaxis(devices, order, range(len(order)))
    if math.prod(grid) == mesh.num_partitions:
        return xla_sharding.Sharding.tile(grouped.reshape(grid))

    # The grid's last dimension lists the devices along the other axes, which hold equal slices.
    return xla_sharding.Sharding.partial_tile(grouped.reshape([*grid, -1]))
