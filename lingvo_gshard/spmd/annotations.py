"""Where tensors lie, and their parts on one device: print(describe(fn, partitioning).table())."""

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

_OP = "XlaSharding"


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """One tensor and its part on one device."""

    role: str  # `argument`, `result` or `inside`.
    name: str  # `argument.path`, a result's path, or the operation that an inner annotation is on.
    dtype: str
    shape: tuple[int, ...]
    dims: str  # One letter for each dim; empty if an inner annotation was made without letters.
    # The mesh axis of each dim, `-` for a whole one, such as `d,-,-`; or `replicated`, or `manual`;
    # or, if no axes of the mesh fit, the ways of each dim and the devices in order.
    sharding: str
    shard_shape: tuple[int, ...]  # Of one partition's part; an uneven dim is rounded up.

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

    def table(self) -> str:
        """As text: one line for each tensor, then the sums over arguments and over results."""
        rows: list[tuple[object, ...]]
        rows = [("", "tensor", "dtype", "shape", "dims", "sharding", "shard", "bytes/device")]
        for each in self.tensors:
            shape, dims = list(each.shape), each.dims or "-" * bool(each.shape)
            part, size = list(each.shard_shape), each.shard_bytes
            rows.append((each.role, each.name, each.dtype, shape, dims, each.sharding, part, size))
        for role in ("argument", "result"):
            total = sum(each.shard_bytes for each in self.tensors if each.role == role)
            rows.append((role, "all", "", "", "", "", "", total))
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"{self.name} on {self.mesh.num_partitions} devices: {axes}\n{table.text(rows)}"


def describe(annotated: AnnotatedFn, partitioning: Partitioning) -> Description:
    """Describes what `annotated` would hold where: arguments, results and annotated tensors.

    Raises ValueError if an annotated tensor's shape is not static, or as annotated_fn.trace.
    """
    function, results = annotated_fn.trace(annotated, partitioning)
    tensors = _outside(annotated, partitioning, results)
    inside = _inside(function, partitioning.mesh)
    return Description(annotated.name, partitioning.mesh, (*tensors, *inside))


def describe_program(program: Program) -> Description:
    """Describes a program's arguments and results; needs no TensorFlow."""
    tensors = _outside(program, program.partitioning, program.results)
    return Description(program.name, program.partitioning.mesh, tuple(tensors))


def axes_text(axes: tuple[Axis | None, ...]) -> str:
    """The mesh axis of each dim, as in TensorDescription.sharding; several are joined by `+`."""
    if not any(axes):
        return "replicated"
    return ",".join("+".join(names_of([axis])) or "-" for axis in axes)


def _outside(
    fn: AnnotatedFn | Program, parts: Partitioning, results: NestedMap
) -> Iterator[TensorDescription]:
    arguments = specs.named_leaves(fn.arg_names, fn.args)
    for role, leaves in (("argument", arguments), ("result", results.FlattenItems())):
        for path, spec in leaves:
            axes, part = axes_text(parts.axes(spec.dims)), parts.shard_shape(spec)
            yield TensorDescription(role, path, spec.dtype, spec.shape, spec.dims, axes, part)


def _inside(function: Callable[..., Any], mesh: Mesh) -> list[TensorDescription]:
    """The annotations in a traced tf.function's graph, but for those on arguments and results."""
    graph = function.get_concrete_function().graph  # type: ignore[attr-defined]
    proto = graph.as_graph_def(add_shapes=True)
    placeholders = {node.name for node in proto.node if node.op == "Placeholder"}
    results = {output.op.inputs[0].op.name for output in graph.outputs}
    found = [
        _annotation(node, "", mesh)
        for node in proto.node
        if node.op == _OP and node.name not in results and node.input[0] not in placeholders
    ]
    for body in proto.library.function:
        nodes = (node for node in body.node_def if node.op == _OP)
        found += [_annotation(node, f"{body.signature.name}: ", mesh) for node in nodes]
    return found


def _annotation(node: Any, prefix: str, mesh: Mesh) -> TensorDescription:
    shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
    sizes = annotate.static_shape(f"describe: {prefix}{node.name}", shape)
    sharding, ways = _read_sharding(node.attr["sharding"].s, len(sizes), mesh)
    return TensorDescription(
        "inside",
        prefix + node.input[0].split(":")[0],
        tf.as_dtype(node.attr["T"].type).as_numpy_dtype.__name__,
        sizes,
        node.attr[DIMS_ATTRIBUTE].s.decode() if DIMS_ATTRIBUTE in node.attr else "",
        sharding,
        tuple(-(-size // way) for size, way in zip(sizes, ways, strict=True)),
    )


def _read_sharding(serialized: bytes, rank: int, mesh: Mesh) -> tuple[str, tuple[int, ...]]:
    """The `sharding` of a TensorDescription, and how many ways each dim is split."""
    kind, sharding = jax_private.hlo_sharding(serialized)
    if kind != "other":
        return kind, (1,) * rank
    ways = tuple(sharding.tile_assignment_dimensions())[:rank]
    try:
        (axes,) = jax_private.parse_flatten_op_sharding(
            sharding, AbstractMesh(mesh.axis_sizes, mesh.axis_names)
        )
    except (NotImplementedError, AssertionError):  # No axes of the mesh fit.
        text = ",".join("-" if way == 1 else str(way) for way in ways)
        devices = ",".join(map(str, sharding.tile_assignment_devices()))
        return f"{text} ways on {devices}", ways
    return axes_text((*axes, *[None] * (rank - len(axes)))), ways
