"""Trees of TensorSpec: as text and as JAX shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by name from it)
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec

Named = list[tuple[str, TensorSpec]]


def named_leaves(names: tuple[str, ...], trees: tuple[NestedMap, ...]) -> Named:
    """[(name.path, spec)] over all trees, in the flat order of a program's arguments."""
    return [
        (f"{name}.{path}", spec)
        for name, tree in zip(names, trees, strict=True)
        for path, spec in tree.FlattenItems()
    ]


def sharding(
    partitioning: Partitioning, spec: TensorSpec, mesh: jax.sharding.Mesh | AbstractMesh
) -> NamedSharding:
    """The sharding of `spec` over `mesh`, whose axes are the partitioning's."""
    return NamedSharding(mesh, PartitionSpec(*partitioning.axes(spec.dims)))


def device_mesh(
    partitioning: Partitioning,
    devices: Sequence[Any] | None = None,
    name: str = "device_mesh",
) -> jax.sharding.Mesh:
    """The partitioning's mesh of `devices`, the first of JAX's by default.

    Place i of the mesh is devices[mesh.devices[i]]. `name` is for messages.

    Raises:
      ValueError: more partitions than devices.
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
    """The sharding of every spec of `tree` over `mesh`."""
    return tree.Transform(lambda spec: sharding(partitioning, spec, mesh))


def abstract_array(spec: TensorSpec, placed: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding alone."""
    return jax.ShapeDtypeStruct(spec.shape, np.dtype(spec.dtype), sharding=placed)


def to_json(tree: Any) -> Any:
    """A tree of TensorSpec as JSON values; a leaf becomes `dtype|2,3|BL`."""
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
