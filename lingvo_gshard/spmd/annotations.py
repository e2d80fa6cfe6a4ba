"""Describes where tensors lie, and their parts on one device.

print(describe(fn, partitioning).table())
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import table
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import DIMS_ATTRIBUTE
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of
from lingvo_gshard.spmd import annotated_fn, jax_private, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.program import Program

# TensorFlow's operation for an annotation.
_OP = "XlaSharding"


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """One tensor and its part on one device."""

    role: str  # `argument`, `result` or `inside`.
    name: str  # `argument.path`, a result's path, or the operation that an inner annotation is on.
    dtype: str
    shape: tuple[int, ...]
    dims: str  # One letter for each dim; empty if an inner annotation was made without letters.
    # The mesh axis of each dim, `-` for a whole one, such as `d,-,-`; or `replicated` or `manual`.
    # If no axes of the mesh fit: how many ways each dim is split, and the devices of the parts in
    # order; `+` joins those that hold the same part.
    sharding: str
    shard_shape: tuple[int, ...]  # Of one partition's part; an uneven dim is rounded up.

    @property
    def shard_bytes(self) -> int:
        """Returns the bytes of one partition's part."""
        return math.prod(self.shard_shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Description:
    """A function's mesh and its tensors: arguments, then results, then annotated inner ones."""

    name: str
    mesh: Mesh
    tensors: tuple[TensorDescription, ...]

    def table(self) -> str:
        """Returns text: a line for each tensor, then the sums over arguments and over results."""
        rows: list[tuple[object, ...]] = [
            ("", "tensor", "dtype", "shape", "dims", "sharding", "shard", "bytes/device")
        ]
        for tensor in self.tensors:
            is_scalar = not tensor.shape
            rows.append(
                (
                    tensor.role,
                    tensor.name,
                    tensor.dtype,
                    list(tensor.shape),
                    "" if is_scalar else tensor.dims or "-",
                    tensor.sharding,
                    list(tensor.shard_shape),
                    tensor.shard_bytes,
                )
            )

        for role in ("argument", "result"):
            total = sum(tensor.shard_bytes for tensor in self.tensors if tensor.role == role)
            rows.append((role, "all", "", "", "", "", "", total))

        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"{self.name} on {self.mesh.num_partitions} devices: {axes}\n{table.text(rows)}"


def describe(annotated: AnnotatedFn, partitioning: Partitioning) -> Description:
    """Returns what `annotated` would hold where: arguments, results and annotated tensors.

    Raises ValueError if an annotated tensor's shape is not static, or as annotated_fn.trace.
    """
    function, results = annotated_fn.trace(annotated, partitioning)
    outside = _outside(annotated, partitioning, results)
    inside = _inside(function, partitioning.mesh)
    return Description(annotated.name, partitioning.mesh, (*outside, *inside))


def describe_program(program: Program) -> Description:
    """Returns a program's arguments and results; needs no TensorFlow."""
    tensors = _outside(program, program.partitioning, program.results)
    return Description(program.name, program.partitioning.mesh, tuple(tensors))


def axes_text(axes: tuple[Axis | None, ...]) -> str:
    """Returns the axis of each dim, as in TensorDescription.sharding; `+` joins several."""
    if not any(axes):
        return "replicated"
    return ",".join("+".join(names_of([axis])) or "-" for axis in axes)


def _outside(
    function: AnnotatedFn | Program, partitioning: Partitioning, results: NestedMap
) -> Iterator[TensorDescription]:
    """Yields the descriptions of the arguments, then of the results."""
    # A program is partitioned already, but has the same names, trees and specs.
    arguments = specs.named_leaves(function.arg_names, function.args)
    for role, leaves in (("argument", arguments), ("result", results.FlattenItems())):
        for path, spec in leaves:
            yield TensorDescription(
                role=role,
                name=path,
                dtype=spec.dtype,
                shape=spec.shape,
                dims=spec.dims,
                sharding=axes_text(partitioning.axes_of(spec)),
                shard_shape=partitioning.shard_shape(spec),
            )


def _inside(function: Callable[..., Any], mesh: Mesh) -> Iterator[TensorDescription]:
    """Yields the annotations in a traced tf.function's graph.

    Those on arguments and results are left out, as `_outside` has them.
    """
    graph = function.get_concrete_function().graph  # type: ignore[attr-defined]
    proto = graph.as_graph_def(add_shapes=True)
    arguments = {node.name for node in proto.node if node.op == "Placeholder"}
    # An output is the identity of a result's annotation.
    results = {output.op.inputs[0].op.name for output in graph.outputs}

    for node in proto.node:
        if node.op == _OP and node.name not in results and node.input[0] not in arguments:
            yield _annotation(node, "", mesh)

    # The bodies of loops and conditionals are functions of their own.
    for body in proto.library.function:
        for node in body.node_def:
            if node.op == _OP:
                yield _annotation(node, f"{body.signature.name}: ", mesh)


def _annotation(node: Any, prefix: str, mesh: Mesh) -> TensorDescription:
    """Returns the description of an XlaSharding node, a NodeDef, of a graph or loop body."""
    shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
    sizes = annotate.static_shape(f"describe: {prefix}{node.name}", shape)
    sharding, ways = _read_sharding(node.attr["sharding"].s, len(sizes), mesh)

    # The Annotator notes the letters; the paper's split() and shard() have none.
    dims = ""
    if DIMS_ATTRIBUTE in node.attr:
        dims = node.attr[DIMS_ATTRIBUTE].s.decode()

    return TensorDescription(
        role="inside",
        name=prefix + node.input[0].split(":")[0],
        dtype=tf.as_dtype(node.attr["T"].type).as_numpy_dtype.__name__,
        shape=sizes,
        dims=dims,
        sharding=sharding,
        # XLA pads a dim that its ways do not divide.
        shard_shape=tuple(math.ceil(size / n) for size, n in zip(sizes, ways, strict=True)),
    )


def _read_sharding(serialized: bytes, rank: int, mesh: Mesh) -> tuple[str, tuple[int, ...]]:
    """Returns the `sharding` of a TensorDescription, and how many ways each dim is split."""
    # What is not tiled is replicated or manual, and whole on each device.
    kind, sharding = jax_private.hlo_sharding(serialized)
    if kind != "other":
        return kind, (1,) * rank

    # Further dims of the assignment are copies.
    ways = tuple(sharding.tile_assignment_dimensions())[:rank]

    # JAX finds the axes of the mesh that give the same assignment.
    try:
        (axes,) = jax_private.parse_flatten_op_sharding(
            sharding, AbstractMesh(mesh.axis_sizes, mesh.axis_names)
        )
    except (NotImplementedError, AssertionError):  # No axes of the mesh fit.
        text = ",".join("-" if n == 1 else str(n) for n in ways)
        # The devices of a part follow each other.
        devices = np.reshape(sharding.tile_assignment_devices(), [math.prod(ways), -1])
        parts = ",".join("+".join(map(str, copies)) for copies in devices)
        return f"{text} ways on {parts}", ways

    # JAX leaves out the last dims if they are whole.
    whole = [None] * (rank - len(axes))
    return axes_text((*axes, *whole)), ways
