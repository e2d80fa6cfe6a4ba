"""Trees of TensorSpec: their JAX shardings, each process's share, their JSON, and their dtypes."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (it registers the name bfloat16 with NumPy)
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import processes

Named = list[tuple[str, TensorSpec]]
_Mesh = jax.sharding.Mesh | AbstractMesh
ROWS = "B"  # The letter of the dim whose parts the processes read.

# fmt: off
_DTYPES = (
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32",
    "float16", "bfloat16", "float32", "complex64",
    "int64", "uint64", "float64", "complex128",
)
# fmt: on


def named_leaves(names: tuple[str, ...], trees: tuple[NestedMap, ...]) -> Named:
    """[(name.path, spec)] of all trees, in the order of a program's flat arguments."""
    return [
        (f"{name}.{path}", spec)
        for name, tree in zip(names, trees, strict=True)
        for path, spec in tree.FlattenItems()
    ]


def check_dtypes(what: str, leaves: Named, platform: str | None = None) -> None:
    """Refuses dtypes that JAX would narrow silently or that `platform` lacks.

    Raises ValueError, prefixed by `what`, if a dtype is unknown, has 64 bits while JAX's 64-bit
    types are off, or is one that the platform, such as `cpu`, lacks.
    """
    for name, spec in leaves:
        which = f"{what} {name} {list(spec.shape)} is of dtype {spec.dtype}"
        if spec.dtype not in _DTYPES:
            raise ValueError(f"{which}; expected one of {', '.join(_DTYPES)}.")
        if np.dtype(spec.dtype) != jax.dtypes.canonicalize_dtype(spec.dtype):
            raise ValueError(f"{which}, but JAX_ENABLE_X64 is off: set it to 1, or cast.")
        if platform == "tpu" and spec.dtype == "complex128":  # Its compiler would abort.
            raise ValueError(f"{which}, which a {platform} lacks.")


def describe(array: Any) -> str:
    """The dtype and shape of an array or spec, such as `float32[2, 3]`; `absent` for None."""
    return "absent" if array is None else f"{array.dtype}{list(array.shape)}"


def check_same(what: str, found: Mapping[str, Any], wanted: NestedMap) -> None:
    """Raises ValueError, prefixed by `what`, unless `found`, by path, are as the specs `wanted`."""
    expected = dict(wanted.FlattenItems())
    for path in sorted(found.keys() | expected.keys()):
        given, needed = describe(found.get(path)), describe(expected.get(path))
        if given != needed:
            raise ValueError(f"{what}: {path} is {given}, expected {needed}.")


def sharding(partitioning: Partitioning, spec: TensorSpec, mesh: _Mesh) -> NamedSharding:
    """The sharding of `spec` over `mesh`, which has the partitioning's axes."""
    return NamedSharding(mesh, PartitionSpec(*partitioning.axes(spec.dims)))


def shardings(partitioning: Partitioning, tree: NestedMap, mesh: _Mesh) -> NestedMap:
    """The sharding over `mesh` of every spec in `tree`."""
    return tree.Transform(lambda spec: sharding(partitioning, spec, mesh))


def device_mesh(
    partitioning: Partitioning,
    devices: Sequence[Any] | None = None,
    name: str = "device_mesh",
) -> jax.sharding.Mesh:
    """The partitioning's mesh as JAX's: partition i runs on devices[mesh.devices[i]].

    The default is jax.devices(). ValueError, prefixed by `name`, if they are too few.
    """
    devices = list(jax.devices() if devices is None else devices)
    mesh = partitioning.mesh
    if mesh.num_partitions > len(devices):
        raise ValueError(
            f"{name}: {mesh.num_partitions} partitions need as many devices, {len(devices)} were "
            f"found; its mesh is {mesh.shape}."
        )
    grid = np.array([devices[i] for i in mesh.devices], dtype=object).reshape(mesh.axis_sizes)
    return jax.sharding.Mesh(grid, mesh.axis_names)


@dataclasses.dataclass(frozen=True)
class Share:
    """Part `index` of the `count` equal parts of a batch's rows."""

    index: int
    count: int

    def of(self, tree: NestedMap) -> NestedMap:
        """Returns this part of JAX arrays as numpy arrays; all processes must call it."""
        return processes.to_host(tree) if self.count == 1 else tree.Transform(_own_rows)


WHOLE = Share(0, 1)


def own_share(partitioning: Partitioning) -> Share:
    """Returns the share of a batch's rows that this process reads; see `share_of`."""
    size, mesh = partitioning.mesh.num_partitions, device_mesh(partitioning)
    split = sharding(partitioning, TensorSpec((size,), "int32", ROWS), mesh)
    held: dict[int, set[int]] = collections.defaultdict(set)
    device: Any
    for device, (rows,) in split.devices_indices_map((size,)).items():
        held[device.process_index].update(range(*rows.indices(size)))
    return share_of(held, jax.process_index())


def share_of(held: Mapping[int, set[int]], process: int) -> Share:
    """Returns a process's share, given all rows; WHOLE unless they are equal, adjacent parts."""
    size, part = len(set().union(*held.values())), len(held[process])
    parts = {frozenset(range(start, start + part)) for start in range(0, size, part)}
    if size % part or parts != {frozenset(rows) for rows in held.values()}:
        return WHOLE
    return Share(min(held[process]) // part, size // part)


def _own_rows(array: jax.Array) -> np.ndarray:
    by_start = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(by_start[start]) for start in sorted(by_start)])


def abstract_arrays(
    partitioning: Partitioning, leaves: Named, mesh: _Mesh
) -> list[jax.ShapeDtypeStruct]:
    """The shape, dtype and sharding over `mesh` of each leaf."""
    placed = [(spec, sharding(partitioning, spec, mesh)) for _, spec in leaves]
    return [jax.ShapeDtypeStruct(s.shape, np.dtype(s.dtype), sharding=to) for s, to in placed]


def to_json(tree: Any) -> Any:
    """Converts a tree of TensorSpec to JSON values; a leaf becomes `dtype|2,3|BL`."""
    if isinstance(tree, dict):
        return NestedMap(tree).Transform(to_json)
    return f"{tree.dtype}|{','.join(map(str, tree.shape))}|{tree.dims}"


def from_json(tree: Any) -> Any:
    """The inverse of to_json."""
    if isinstance(tree, dict):
        return NestedMap(tree).Transform(from_json)
    dtype, shape, dims = tree.split("|")
    return TensorSpec(tuple(int(size) for size in shape.split(",") if size), dtype, dims)
