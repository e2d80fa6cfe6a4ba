"""Where tensors lie, and their parts on one device: print(describe(program).table())."""

import dataclasses
import enum
import math
from typing import Any

import numpy as np

from lingvo_gshard.core import table
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of
from lingvo_gshard.spmd import specs
from lingvo_gshard.spmd.program import Program


class Role(enum.StrEnum):
    """A tensor's place in a function."""

    ARGUMENT = "argument"
    RESULT = "result"
    INSIDE = "inside"


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """One tensor and its part on one device."""

    role: Role
    name: str  # `argument.path`, a result's path, or the operation that an inner annotation is on.
    dtype: str
    shape: tuple[int, ...]
    dims: str  # One letter for each dim; empty if an inner annotation was made without letters.
    # The mesh axis of each dim, `-` for a whole one, such as `d,-,-`; or `replicated`, or `manual`;
    # or, if no axes of the mesh fit, the ways of each dim and the devices in order.
    sharding: str
    ways: tuple[int, ...]  # How many ways each dim is split; 1 if it is whole or manual.

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one partition's part; an uneven dim is rounded up."""
        return tuple(-(-size // way) for size, way in zip(self.shape, self.ways, strict=True))

    @property
    def shard_bytes(self) -> int:
        """The bytes of one partition's part."""
        return math.prod(self.shard_shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Description:
    """A function's mesh and its tensors: arguments, then results, then annotated inner ones."""

    name: str
    mesh: Mesh
    tensors: tuple[TensorDescription, ...]

    def total_bytes(self, role: Role) -> int:
        """The bytes on one device of all tensors with this role."""
        return sum(tensor.shard_bytes for tensor in self.tensors if tensor.role is role)

    def table(self) -> str:
        """As text: one line for each tensor, then the sums over arguments and over results."""
        rows: list[tuple[object, ...]]
        rows = [("", "tensor", "dtype", "shape", "dims", "sharding", "shard", "bytes/device")]
        for each in self.tensors:
            shape, dims = list(each.shape), each.dims or "-" * bool(each.shape)
            part, size = list(each.shard_shape), each.shard_bytes
            rows.append((each.role, each.name, each.dtype, shape, dims, each.sharding, part, size))
        for role in (Role.ARGUMENT, Role.RESULT):
            rows.append((role, "all", "", "", "", "", "", self.total_bytes(role)))
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"{self.name} on {self.mesh.num_partitions} devices: {axes}\n{table.text(rows)}"


def describe(program: Program) -> Description:
    """Describes a program's arguments and results; see annotations.describe for its inside."""
    return interface(program, program.partitioning, program.results)


def interface(fn: Any, partitioning: Partitioning, results: NestedMap) -> Description:
    """Describes the arguments of a Program or AnnotatedFn, and its results' TensorSpecs."""
    arguments = specs.named_leaves(fn.arg_names, fn.args)
    tensors = tuple(
        TensorDescription(
            role,
            path,
            spec.dtype,
            spec.shape,
            spec.dims,
            axes_text(partitioning.axes(spec.dims)),
            partitioning.factor(spec.dims),
        )
        for role, leaves in ((Role.ARGUMENT, arguments), (Role.RESULT, results.FlattenItems()))
        for path, spec in leaves
    )
    return Description(fn.name, partitioning.mesh, tensors)


def axes_text(axes: tuple[Axis | None, ...]) -> str:
    """The mesh axis of each dim, as in TensorDescription.sharding; several are joined by `+`."""
    if not any(axes):
        return "replicated"
    return ",".join("+".join(names_of([axis])) or "-" for axis in axes)
