"""Descriptions of where tensors lie: each with its sharding and its part on one device.

print(describe(program).table())
"""

import dataclasses
import enum
import json
import math

import ml_dtypes  # noqa: F401  (it registers the name bfloat16 with NumPy)
import numpy as np

from lingvo_gshard.core import table
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, names_of
from lingvo_gshard.spmd import specs
from lingvo_gshard.spmd.program import Program

REPLICATED = "replicated"


class Role(enum.Enum):
    """A tensor's place in a function."""

    ARGUMENT = "argument"
    RESULT = "result"
    INSIDE = "inside"


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """One tensor and its part on one device.

    Attributes:
      role: argument, result or inside.
      name: `argument.path`, a result's path, or the operation that an inner annotation is on.
      dtype: numpy's name for it.
      shape: the logical shape.
      dims: one letter for each dim; empty if an inner annotation was made without letters.
      sharding: the mesh axis of each dim, `-` for a whole one, such as `d,-,-`; or `replicated`,
        or `manual`; or, if no axes of the mesh fit, the ways of each dim and the devices in order.
      shard_shape: the shape of one partition's part; an uneven dim is rounded up.
      shard_bytes: the bytes of that part.
    """

    role: Role
    name: str
    dtype: str
    shape: tuple[int, ...]
    dims: str
    sharding: str
    shard_shape: tuple[int, ...]
    shard_bytes: int


@dataclasses.dataclass(frozen=True)
class Description:
    """A function's arguments, results and annotated tensors.

    Attributes:
      name: the function's name.
      mesh_axes: the (name, size) of each axis.
      tensors: arguments, then results, then inner tensors.
    """

    name: str
    mesh_axes: tuple[tuple[str, int], ...]
    tensors: tuple[TensorDescription, ...]

    def total_bytes(self, role: Role) -> int:
        """The bytes on one device of all tensors with this role."""
        return sum(tensor.shard_bytes for tensor in self.tensors if tensor.role is role)

    def table(self) -> str:
        """As text: one line for each tensor, then the sums over arguments and over results."""
        rows: list[tuple[str, ...]]
        rows = [("", "tensor", "dtype", "shape", "dims", "sharding", "shard", "bytes/device")]
        rows += [_cells(tensor) for tensor in self.tensors]
        rows += [
            (role.value, "all", "", "", "", "", "", str(self.total_bytes(role)))
            for role in (Role.ARGUMENT, Role.RESULT)
        ]
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh_axes)
        num_devices = math.prod(size for _, size in self.mesh_axes)
        return f"{self.name} on {num_devices} devices: {axes}\n{table.text(rows)}"

    def to_json(self) -> str:
        """As JSON, with the fields' names as keys."""
        values = dataclasses.asdict(self)
        for tensor in values["tensors"]:
            tensor["role"] = tensor["role"].value
        return json.dumps(values, indent=2)


def describe(program: Program) -> Description:
    """Describes a program's arguments and results.

    What is annotated inside it is part of its code by now; see annotations.describe.
    """
    arguments = specs.named_leaves(program.arg_names, program.args)
    return interface(program.name, program.partitioning, arguments, program.results)


def interface(
    name: str, partitioning: Partitioning, arguments: specs.Named, results: NestedMap
) -> Description:
    """Describes a function's arguments, given by name, and its results."""
    named = [(Role.ARGUMENT, *leaf) for leaf in arguments]
    named += [(Role.RESULT, *leaf) for leaf in results.FlattenItems()]
    tensors = tuple(
        tensor(
            role,
            path,
            spec.dtype,
            spec.shape,
            spec.dims,
            sharding=axes_text(partitioning.axes(spec.dims)),
            ways=partitioning.factor(spec.dims),
        )
        for role, path, spec in named
    )
    mesh = partitioning.mesh
    axes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return Description(name, axes, tensors)


def tensor(
    role: Role,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    dims: str,
    *,
    sharding: str,
    ways: tuple[int, ...],
) -> TensorDescription:
    """Describes a tensor whose dim i is split ways[i] ways."""
    part = tuple(-(-size // way) for size, way in zip(shape, ways, strict=True))
    num_bytes = math.prod(part) * np.dtype(dtype).itemsize
    return TensorDescription(role, name, dtype, shape, dims, sharding, part, num_bytes)


def axes_text(axes: tuple[Axis | None, ...]) -> str:
    """The mesh axis of each dim, as in TensorDescription.sharding; several are joined by `+`."""
    if not any(axes):
        return REPLICATED
    return ",".join("+".join(names_of([axis])) or "-" for axis in axes)


def _cells(tensor: TensorDescription) -> tuple[str, ...]:
    return (
        tensor.role.value,
        tensor.name,
        tensor.dtype,
        str(list(tensor.shape)),
        tensor.dims or "-" * bool(tensor.shape),
        tensor.sharding,
        str(list(tensor.shard_shape)),
        str(tensor.shard_bytes),
    )
