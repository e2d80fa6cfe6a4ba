"""Describes the sharding of tensors, and their parts on one device.

print(describe(fn, partitioning).table())
"""

import dataclasses
import html
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lingvo_gshard.core import tf_private
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.annotator import DIMS_ATTRIBUTE
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.spmd import annotated_fn, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from xla_spmd.annotations import tilings
from xla_spmd.files import table
from xla_spmd.mesh import Axis, Mesh, names_of

# TensorFlow's operation for an annotation.
_OP = "XlaSharding"


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """One tensor and its part on one device."""

    role: str  # `argument`, `result` or `inside`.
    name: str  # `argument.path`, a result's path, or an inner annotation's operation.
    dtype: str
    shape: tuple[int, ...]
    dims: str  # One letter for each dim; empty for an inner annotation without letters.
    # The mesh axis of each dim, or `-` for a whole dim, for example `d,-,-`; or `replicated` or
    # `manual`. `d:(2)4` is a part of an axis, as Shardy writes it: 4 steps in each half of d. If no
    # axes of the mesh fit, it is the number of parts of each dim, and the devices of the parts in
    # order; `+` joins the devices that hold the same part.
    sharding: str
    shard_shape: tuple[int, ...]  # One partition's part; an uneven dim is rounded up.

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
        """Returns a line of text for each tensor, then the sums over arguments and over results."""
        return f"{self._title()}\n{table.text(self._rows())}"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._title())}</p>\n{table.as_html(self._rows())}"

    def _title(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"{self.name} on {self.mesh.num_partitions} devices: {axes}"

    def _rows(self) -> list[tuple[object, ...]]:
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
        return rows


def describe(annotated: AnnotatedFn, partitioning: Partitioning) -> Description:
    """Describes the arguments, results and annotated tensors of `annotated`.

    Raises ValueError if a tensor's shape is not static, if a donated argument is not returned with
    the same specs, if the function reads a tf.Variable, or for a dtype that JAX would narrow.
    """
    function, results = annotated_fn.trace(annotated, partitioning)
    outside = _outside(annotated, partitioning, results)
    inside = _inside(function, partitioning.mesh)
    return Description(annotated.name, partitioning.mesh, (*outside, *inside))


def axes_text(axes: tuple[Axis | None, ...]) -> str:
    """Returns the axis of each dim, as in TensorDescription.sharding. `+` joins several axes."""
    if not any(axes):
        return "replicated"
    return ",".join("+".join(names_of([axis])) or "-" for axis in axes)


def _outside(
    function: AnnotatedFn, partitioning: Partitioning, results: NestedMap
) -> Iterator[TensorDescription]:
    """Yields the descriptions of the arguments, then of the results."""
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

    Skips annotations on arguments and results, which `_outside` describes.
    """
    graph = function.get_concrete_function().graph  # type: ignore[attr-defined]
    proto = graph.as_graph_def(add_shapes=True)
    arguments = {node.name for node in proto.node if node.op == "Placeholder"}
    # An output is the identity of a result's annotation.
    results = {output.op.inputs[0].op.name for output in graph.outputs}

    for node in proto.node:
        if node.op == _OP and node.name not in results and node.input[0] not in arguments:
            yield _annotation(node, "", mesh)

    # The bodies of loops and conditionals are separate functions.
    for body in proto.library.function:
        for node in body.node_def:
            if node.op == _OP:
                yield _annotation(node, f"{body.signature.name}: ", mesh)


def _annotation(node: Any, prefix: str, mesh: Mesh) -> TensorDescription:
    """Describes an XlaSharding node (a NodeDef) of a graph or loop body."""
    shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
    sizes = annotate.static_shape(f"describe: {prefix}{node.name}", shape)
    sharding, ways = _read_sharding(node.attr["sharding"].s, len(sizes), mesh)

    # The Annotator records the letters; the paper's split() and shard() do not have them.
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
        # XLA pads a dim that its number of parts does not divide.
        shard_shape=tuple(math.ceil(size / n) for size, n in zip(sizes, ways, strict=True)),
    )


def _read_sharding(serialized: bytes, rank: int, mesh: Mesh) -> tuple[str, tuple[int, ...]]:
    """Returns the `sharding` of a TensorDescription, and the number of parts of each dim."""
    proto = tf_private.annotation(serialized)
    kind = proto.Type.Name(proto.type).lower()
    if kind != "other":  # Replicated or manual, and whole on each device.
        return kind, (1,) * rank

    tiling = tilings.of_proto(proto)
    dims = tilings.along(tiling, mesh)
    if dims is None:  # The sharding fits no axes of the mesh.
        text = ",".join("-" if n == 1 else str(n) for n in tiling.ways)
        parts = ",".join("+".join(map(str, copies)) for copies in tiling.devices)
        return f"{text} ways on {parts}", tiling.ways

    names = ["+".join(axis.axis + axis.part for axis in axes) or "-" for axes in dims]
    return ",".join(names), tiling.ways
