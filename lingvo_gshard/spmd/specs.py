"""Trees of TensorSpec: JAX shardings, each process's share, JSON, and dtypes."""

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
from lingvo_gshard.spmd import padded, processes

Named = list[tuple[str, TensorSpec]]
_Mesh = jax.sharding.Mesh | AbstractMesh
ROWS = "B"  # The dim whose parts the processes read separately.

_DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    # JAX has these dtypes if JAX_ENABLE_X64 is on.
    "int64",
    "uint64",
    "float64",
    "complex128",
)


def named_leaves(names: tuple[str, ...], trees: tuple[NestedMap, ...]) -> Named:
    """Returns [(name.path, spec)] of all trees, in the order of a program's flat arguments."""
    leaves = []
    for name, tree in zip(names, trees, strict=True):
        for path, spec in tree.FlattenItems():
            leaves.append((f"{name}.{path}", spec))
    return leaves


def check_dtypes(what: str, leaves: Named, platform: str | None = None) -> None:
    """Refuses dtypes that JAX would narrow silently or that `platform` lacks.

    Raises ValueError, prefixed by `what`, if a dtype is unknown, has 64 bits while JAX's 64-bit
    types are off, or is missing on the platform, such as `cpu`.
    """
    for name, spec in leaves:
        description = f"{what} {name} {list(spec.shape)} is of dtype {spec.dtype}"
        if spec.dtype not in _DTYPES:
            raise ValueError(f"{description}; expected one of {', '.join(_DTYPES)}.")
        if np.dtype(spec.dtype) != jax.dtypes.canonicalize_dtype(spec.dtype):
            raise ValueError(f"{description}, but JAX_ENABLE_X64 is off: set it to 1, or cast.")
        if platform == "tpu" and spec.dtype == "complex128":  # The TPU's compiler would abort.
            raise ValueError(f"{description}, which a {platform} lacks.")


def describe(array: Any) -> str:
    """Returns the dtype and shape of an array or spec, `float32[2, 3]`; `absent` for None."""
    if array is None:
        return "absent"
    dtype = getattr(array.dtype, "name", array.dtype)
    return f"{dtype}{list(array.shape)}"


def check_same(what: str, arrays: Mapping[str, Any], expected_specs: NestedMap) -> None:
    """Raises ValueError, prefixed by `what`, unless arrays, by path, have the expected specs."""
    expected = dict(expected_specs.FlattenItems())
    for path in sorted(arrays.keys() | expected.keys()):
        given = describe(arrays.get(path))
        needed = describe(expected.get(path))
        if given != needed:
            raise ValueError(f"{what}: {path} is {given}, expected {needed}.")


def sharding(partitioning: Partitioning, spec: TensorSpec, mesh: _Mesh) -> NamedSharding:
    """Returns the sharding of `spec` over `mesh`, which has the partitioning's axes."""
    return NamedSharding(mesh, PartitionSpec(*partitioning.axes_of(spec)))


def shardings(partitioning: Partitioning, tree: NestedMap, mesh: _Mesh) -> NestedMap:
    """Returns the sharding over `mesh` of every spec in `tree`."""
    return tree.Transform(lambda spec: sharding(partitioning, spec, mesh))


def device_mesh(
    partitioning: Partitioning,
    devices: Sequence[Any] | None = None,
    name: str = "device_mesh",
) -> jax.sharding.Mesh:
    """Returns the partitioning's mesh as JAX's: partition i runs on devices[mesh.devices[i]].

    `devices` default to jax.devices(). Raises ValueError, prefixed by `name`, if there are too few.
    """
    devices = list(jax.devices() if devices is None else devices)
    mesh = partitioning.mesh
    if mesh.num_partitions > len(devices):
        raise ValueError(
            f"{name}: {mesh.num_partitions} partitions need as many devices, {len(devices)} were "
            f"found; its mesh is {mesh.shape}."
        )

    # An array of objects; otherwise NumPy would look into the devices.
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


def num_rows(batch: NestedMap) -> int:
    """Returns the size of dim B in the specs of a batch, or 1 if they lack that dim."""
    for spec in batch.Flatten():
        if ROWS in spec.dims:
            return spec.shape[spec.dims.index(ROWS)]
    return 1


def own_share(partitioning: Partitioning, batch_size: int) -> Share:
    """Returns the share of a batch's rows that this process reads; see `share_of`.

    It is WHOLE if the devices do not divide the rows, as the processes then hold unequal parts.
    """
    (row_partitions,) = partitioning.factor(ROWS)
    if batch_size % row_partitions:
        return WHOLE

    # If there are as many rows as partitions, each device holds at least one whole row.
    num_rows = partitioning.mesh.num_partitions
    mesh = device_mesh(partitioning)
    row_sharding = sharding(partitioning, TensorSpec((num_rows,), "int32", ROWS), mesh)

    rows_of_process: dict[int, set[int]] = collections.defaultdict(set)
    device: Any
    for device, (rows,) in row_sharding.devices_indices_map((num_rows,)).items():
        rows_of_process[device.process_index].update(range(*rows.indices(num_rows)))
    return share_of(rows_of_process, jax.process_index())


def share_of(rows_of_process: Mapping[int, set[int]], process: int) -> Share:
    """Returns a process's share of the rows; WHOLE unless the parts are equal and adjacent."""
    num_rows = len(set().union(*rows_of_process.values()))
    own_rows = rows_of_process[process]
    part_size = len(own_rows)
    if num_rows % part_size:
        return WHOLE

    # Several processes may hold the same part, for example along a mesh's other axis.
    parts = {frozenset(rows) for rows in rows_of_process.values()}
    adjacent_parts = {
        frozenset(range(start, start + part_size)) for start in range(0, num_rows, part_size)
    }
    if parts != adjacent_parts:
        return WHOLE
    return Share(index=min(own_rows) // part_size, count=num_rows // part_size)


def _own_rows(array: jax.Array) -> np.ndarray:
    """Returns the rows that this process's devices hold, without duplicates, in order."""
    # Devices along the mesh's other axes hold the same rows.
    by_start = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(by_start[start]) for start in sorted(by_start)])


def abstract_arrays(
    partitioning: Partitioning, leaves: Named, mesh: _Mesh
) -> list[jax.ShapeDtypeStruct]:
    """Returns each leaf's padded shape, its dtype, and its sharding over `mesh`."""
    arrays = []
    for _, spec in leaves:
        layout = sharding(partitioning, spec, mesh)
        shape = padded.padded_shape(layout, spec.shape)
        arrays.append(jax.ShapeDtypeStruct(shape, np.dtype(spec.dtype), sharding=layout))
    return arrays


def to_json(tree: Any) -> Any:
    """Converts a tree of TensorSpec to JSON values.

    A leaf becomes `dtype|2,3|BL`, or `dtype|2,3|MH|encoder` if a stack's rows split it.
    """
    if isinstance(tree, dict):
        return NestedMap(tree).Transform(to_json)
    parts = [tree.dtype, ",".join(map(str, tree.shape)), tree.dims]
    if tree.stack:
        parts.append(tree.stack)
    return "|".join(parts)


def from_json(tree: Any) -> Any:
    """Converts JSON values of to_json back to a tree of TensorSpec."""
    if isinstance(tree, dict):
        return NestedMap(tree).Transform(from_json)
    dtype, sizes, dims, *stack = tree.split("|")
    shape = tuple(int(size) for size in sizes.split(",") if size)
    return TensorSpec(shape, dtype, dims, *stack)
