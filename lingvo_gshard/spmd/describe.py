"""What lies where: every argument, result and annotated tensor, with its part on one device.

print(describe(annotated_fn, partitioning).table())
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401  (numpy learns bfloat16 by name from it)
import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, names_of
from lingvo_gshard.spmd import specs
from lingvo_gshard.spmd.program import Program

if TYPE_CHECKING:
    from lingvo_gshard.spmd.annotated_fn import AnnotatedFn

REPLICATED = "replicated"


class Role(enum.Enum):
    """Where a tensor stands."""

    ARGUMENT = "argument"
    RESULT = "result"
    INSIDE = "inside"


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """One tensor and its part on one device.

    Attributes:
      role: argument, result or inside.
      name: `argument.path`, a result's path, or the operation that an inner annotation is on.
      dtype: numpy's name.
      shape: logical.
      dims: one letter a dim; empty where an inner annotation was made without letters.
      sharding: the mesh axis of each dim, `-` where whole, such as `d,-,-`; or `replicated`, or
        `manual`; or, where no axes of the mesh fit, the ways of each dim and the devices in order.
      shard_shape: of one partition's part; an uneven dim is rounded up.
      shard_bytes: bytes of that part.
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
    """All tensors of a function or program that an annotation names.

    Attributes:
      name: the function's name.
      mesh_axes: (name, size) of each.
      tensors: arguments, then results, then inner ones, each in its own order.
    """

    name: str
    mesh_axes: tuple[tuple[str, int], ...]
    tensors: tuple[TensorDescription, ...]

    def total_bytes(self, role: Role) -> int:
        """Bytes on one device of all tensors of a role."""
        return sum(tensor.shard_bytes for tensor in self.tensors if tensor.role is role)

    def table(self) -> str:
        """As text: a line a tensor, and the arguments' and results' sums."""
        rows: list[tuple[str, ...]]
        rows = [("", "tensor", "dtype", "shape", "dims", "sharding", "shard", "bytes/device")]
        rows += [_cells(tensor) for tensor in self.tensors]
        rows += [
            (role.value, "all", "", "", "", "", "", str(self.total_bytes(role)))
            for role in (Role.ARGUMENT, Role.RESULT)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh_axes)
        lines = [f"{self.name} on {math.prod(size for _, size in self.mesh_axes)} devices: {axes}"]
        for *left, last in rows:
            cells = [cell.ljust(width) for cell, width in zip(left, widths[:-1], strict=True)]
            lines.append("  ".join([*cells, last.rjust(widths[-1])]))
        return "\n".join(lines)

    def to_json(self) -> str:
        """As JSON: the fields of the records."""
        values = dataclasses.asdict(self)
        for tensor in values["tensors"]:
            tensor["role"] = tensor["role"].value
        return json.dumps(values, indent=2)


def describe(what: AnnotatedFn | Program, partitioning: Partitioning | None = None) -> Description:
    """Describes an AnnotatedFn under a partitioning, or a Program, which has its own.

    A Program's inner annotations are part of its code no longer: only an AnnotatedFn shows them.

    Raises:
      ValueError: an AnnotatedFn without a partitioning, a Program with another one than its own;
        or as annotated_fn.trace.
    """
    if isinstance(what, Program):
        if partitioning not in (None, what.partitioning):
            raise ValueError(
                f"describe: program {what.name} has the partitioning {what.partitioning}; "
                f"{partitioning} was given."
            )
        interface = _interface(what, what.results, what.partitioning)
        return _description(what.name, what.partitioning, interface)
    if partitioning is None:
        raise ValueError(f"describe: {what.name} is no program yet; a partitioning is expected.")
    from lingvo_gshard.spmd import annotated_fn, annotations  # They load TensorFlow.

    traced = annotated_fn.trace(what, partitioning)
    inside = [
        TensorDescription(
            Role.INSIDE,
            found.name,
            found.dtype,
            found.shape,
            found.dims,
            found.sharding,
            *_part(found.shape, found.ways, found.dtype),
        )
        for found in annotations.read(traced.function, partitioning.mesh)
    ]
    interface = _interface(what, traced.results, partitioning)
    return _description(what.name, partitioning, [*interface, *inside])


def _description(
    name: str, partitioning: Partitioning, tensors: Iterable[TensorDescription]
) -> Description:
    mesh = partitioning.mesh
    axes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return Description(name, axes, tuple(tensors))


def _interface(
    what: AnnotatedFn | Program, results: NestedMap, parts: Partitioning
) -> list[TensorDescription]:
    """Arguments and results."""
    named = [(Role.ARGUMENT, *leaf) for leaf in specs.named_leaves(what.arg_names, what.args)]
    named += [(Role.RESULT, path, spec) for path, spec in results.FlattenItems()]
    return [
        TensorDescription(
            role,
            name,
            spec.dtype,
            spec.shape,
            spec.dims,
            axes_text(parts.axes(spec.dims)),
            *_part(spec.shape, parts.factor(spec.dims), spec.dtype),
        )
        for role, name, spec in named
    ]


def axes_text(axes: tuple[Axis | None, ...]) -> str:
    """The mesh axis of each dim as a description writes it; several are joined by +."""
    if not any(axes):
        return REPLICATED
    return ",".join("+".join(names_of([axis])) or "-" for axis in axes)


def _part(shape: tuple[int, ...], ways: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], int]:
    """The shape and bytes of one partition's part."""
    part = tuple(-(-size // way) for size, way in zip(shape, ways, strict=True))
    return part, math.prod(part) * np.dtype(dtype).itemsize


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
