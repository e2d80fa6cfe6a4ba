"""Converts trees of TensorSpec to JAX shardings and to JSON."""

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (it registers the name bfloat16 with NumPy)
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec

Named = list[tuple[str, TensorSpec]]


def named_leaves(names: tuple[str, ...], trees: tuple[NestedMap, ...]) -> Named:
    """[(name.path, spec)] of all trees, in the order of a program's flat arguments."""
    return [
        (f"{name}.{path}", spec)
        for name, tree in zip(names, trees, strict=True)
        for path, spec in tree.FlattenItems()
    ]


def sharding(
    partitioning: Partitioning, spec: TensorSpec, mesh: jax.sharding.Mesh | AbstractMesh
) -> NamedSharding:
    """The sharding of `spec` over `mesh`, which has the partitioning's axes."""
    return NamedSharding(mesh, PartitionSpec(*partitioning.axes(spec.dims)))


def device_mesh(
    partitioning: Partitioning,
    devices: Sequence[Any] | None = None,
    name: str = "device_mesh",
) -> jax.sharding.Mesh:
    """The partitioning's mesh as JAX's.

    Args:
      partitioning: its partition i runs on devices[mesh.devices[i]].
      devices: jax.devices() by default.
      name: the name in messages.

    Raises:
      ValueError: there are more partitions than devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    mesh = partitioning.mesh
    if mesh.num_partitions > len(devices):
        raise ValueError(
            f"{name}: {mesh.num_partitions} partitions need as many devices, {len(devices)} were "
            f"found; its mesh is {dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))}."
        )
    grid = np.array([devices[i] for i in mesh.devices], dtype=object).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(grid, mesh.axis_names)


def shardings(
    partitioning: Partitioning, tree: NestedMap, mesh: jax.sharding.Mesh | AbstractMesh
) -> NestedMap:
    """The sharding over `mesh` of every spec in `tree`."""
    return tree.Transform(lambda spec: sharding(partitioning, spec, mesh))


def abstract_array(spec: TensorSpec, placed: NamedSharding) -> jax.ShapeDtypeStruct:
    """An array's shape, dtype and sharding, without its values."""
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=placed)


def to_json(tree: Any) -> Any:
    """Converts a tree of TensorSpec to JSON values; a leaf becomes `dtype|2,3|BL`."""
    if isinstance(tree, dict):
        return {key: to_json(value) for key, value in sorted(tree.items())}
    if isinstance(tree, list):
        return [to_json(item) for item in tree]
    return f"{tree.dtype}|{','.join(map(str, tree.shape))}|{tree.dims}"


def from_json(tree: Any) -> Any:
    """The inverse of to_json."""
    if isinstance(tree, dict):
        return NestedMap({key: from_json(value) for key, value in tree.items()})
    if isinstance(tree, list):
        return [from_json(item) for item in tree]
    dtype, shape, dims = tree.split("|")
    return TensorSpec(tuple(int(size) for size in shape.split(",") if size), dtype, dims)
