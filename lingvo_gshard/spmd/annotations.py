"""Describes an AnnotatedFn before it is compiled, with the annotations inside it.

They are the XlaSharding operations of its graph.

print(describe(annotated_fn, partitioning).table())
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2

from lingvo_gshard.sharding.annotator import DIMS_ATTRIBUTE
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Axis, Mesh, names_of
from lingvo_gshard.spmd import annotated_fn, specs
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.describe import (
    REPLICATED,
    Description,
    Role,
    TensorDescription,
    axes_text,
    interface,
    tensor,
)

_OP = "XlaSharding"
_OpSharding = xla_data_pb2.OpSharding


def describe(annotated: AnnotatedFn, partitioning: Partitioning) -> Description:
    """Describes what `annotated` would hold where: arguments, results and annotated tensors.

    Raises:
      ValueError: an annotated tensor's shape is not static; or as annotated_fn.trace.
    """
    traced = annotated_fn.trace(annotated, partitioning)
    arguments = specs.named_leaves(annotated.arg_names, annotated.args)
    outside = interface(annotated.name, partitioning, arguments, traced.results)
    inside = _read(traced.function, partitioning.mesh)
    return dataclasses.replace(outside, tensors=(*outside.tensors, *inside))


def _read(function: Callable[..., Any], mesh: Mesh) -> list[TensorDescription]:
    """The annotations in the graph of a traced tf.function, loops' bodies included.

    Those that the trace itself puts on arguments and results are left out.
    """
    graph = function.get_concrete_function().graph  # type: ignore[attr-defined]
    proto = graph.as_graph_def(add_shapes=True)
    placeholders = {node.name for node in proto.node if node.op == "Placeholder"}
    results = {output.op.inputs[0].op.name for output in graph.outputs}
    outer = (
        node
        for node in proto.node
        if node.op == _OP and node.name not in results and node.input[0] not in placeholders
    )
    found = [_annotation(node, "", mesh) for node in outer]
    for body in proto.library.function:
        nodes = (node for node in body.node_def if node.op == _OP)
        found += [_annotation(node, f"{body.signature.name}: ", mesh) for node in nodes]
    return found


def _annotation(node: Any, prefix: str, mesh: Mesh) -> TensorDescription:
    shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
    if not shape.is_fully_defined():
        raise ValueError(
            f"describe: {prefix}{node.name} has shape {shape}; a static one is expected."
        )
    sharding = _OpSharding.FromString(node.attr["sharding"].s)
    text, ways = _read_sharding(sharding, shape.rank, mesh)
    dims = node.attr[DIMS_ATTRIBUTE].s.decode() if DIMS_ATTRIBUTE in node.attr else ""
    return tensor(
        Role.INSIDE,
        prefix + node.input[0].split(":")[0],
        tf.as_dtype(node.attr["T"].type).as_numpy_dtype.__name__,
        tuple(shape.as_list()),
        dims,
        sharding=text,
        ways=ways,
    )


def _read_sharding(sharding: Any, rank: int, mesh: Mesh) -> tuple[str, tuple[int, ...]]:
    """TensorDescription.sharding, and how many ways each dim is split: 1 if whole or manual."""
    whole = (1,) * rank
    if sharding.type == _OpSharding.REPLICATED:
        return REPLICATED, whole
    if sharding.type != _OpSharding.OTHER:
        return _OpSharding.Type.Name(sharding.type).lower(), whole
    ways = tuple(sharding.tile_assignment_dimensions)[:rank]
    devices = _devices(sharding)
    for axes in _candidates(ways, mesh):
        if devices == _devices_along(axes, mesh):
            return axes_text(axes), ways
    text = ",".join("-" if way == 1 else str(way) for way in ways)
    return f"{text} ways on {','.join(map(str, devices))}", ways


def _devices(sharding: Any) -> list[int]:
    """The devices in the order of the tiles."""
    if sharding.iota_reshape_dims:
        ids = np.arange(np.prod(sharding.iota_reshape_dims)).reshape(sharding.iota_reshape_dims)
        return ids.transpose(sharding.iota_transpose_perm).ravel().tolist()
    return list(sharding.tile_assignment_devices)


def _candidates(ways: tuple[int, ...], mesh: Mesh) -> Iterator[tuple[Axis | None, ...]]:
    """All choices of an axis for each dim, none used twice, whose sizes are `ways`."""
    known: list[Axis] = [
        names if len(names) > 1 else names[0]
        for count in range(1, len(mesh.axis_names) + 1)
        for names in itertools.permutations(mesh.axis_names, count)
    ]
    choices: list[list[Axis | None]] = [
        [None] if way == 1 else [axis for axis in known if mesh.size(axis) == way] for way in ways
    ]
    for axes in itertools.product(*choices):
        used = names_of(axes)
        if len(set(used)) == len(used):
            yield axes


def _devices_along(axes: tuple[Axis | None, ...], mesh: Mesh) -> list[int]:
    """The partitions in the order of the tiles when dims lie along `axes`."""
    used = [mesh.axis_names.index(name) for name in names_of(axes)]
    rest = [i for i in range(len(mesh.axis_names)) if i not in used]
    places = np.arange(mesh.num_partitions).reshape(mesh.axis_sizes)
    return places.transpose(used + rest).ravel().tolist()
