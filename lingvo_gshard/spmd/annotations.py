"""Describes an AnnotatedFn before it is compiled: print(describe(annotated_fn, parts).table())."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from jax._src.lib import xla_client  # JAX has no public reader of XLA's shardings.
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import AbstractMesh

from lingvo_gshard.sharding.annotator import DIMS_ATTRIBUTE
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import annotated_fn
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.describe import Description, Role, TensorDescription, axes_text, interface

_OP = "XlaSharding"


def describe(annotated: AnnotatedFn, partitioning: Partitioning) -> Description:
    """Describes what `annotated` would hold where: arguments, results and annotated tensors.

    Raises ValueError if an annotated tensor's shape is not static, or as annotated_fn.trace.
    """
    traced = annotated_fn.trace(annotated, partitioning)
    outside = interface(annotated, partitioning, traced.results)
    inside = _read(traced.function, partitioning.mesh)
    return dataclasses.replace(outside, tensors=(*outside.tensors, *inside))


def _read(function: Callable[..., Any], mesh: Mesh) -> list[TensorDescription]:
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
    if not shape.is_fully_defined():
        raise ValueError(
            f"describe: {prefix}{node.name} has shape {shape}; a static one is expected."
        )
    sharding, ways = _read_sharding(node.attr["sharding"].s, shape.rank, mesh)
    return TensorDescription(
        Role.INSIDE,
        prefix + node.input[0].split(":")[0],
        tf.as_dtype(node.attr["T"].type).as_numpy_dtype.__name__,
        tuple(shape.as_list()),
        node.attr[DIMS_ATTRIBUTE].s.decode() if DIMS_ATTRIBUTE in node.attr else "",
        sharding,
        ways,
    )


def _read_sharding(serialized: bytes, rank: int, mesh: Mesh) -> tuple[str, tuple[int, ...]]:
    """The `sharding` and `ways` of a TensorDescription."""
    proto = xla_client.OpSharding()
    proto.ParseFromString(serialized)
    if proto.type != xla_client.OpSharding.Type.OTHER:
        return proto.type.name.lower(), (1,) * rank
    sharding = xla_client.HloSharding.from_proto(proto)
    ways = tuple(sharding.tile_assignment_dimensions())[:rank]
    try:
        (axes,) = parse_flatten_op_sharding(
            sharding, AbstractMesh(mesh.axis_sizes, mesh.axis_names)
        )
    except NotImplementedError:  # No axes of the mesh fit.
        text = ",".join("-" if way == 1 else str(way) for way in ways)
        devices = ",".join(map(str, sharding.tile_assignment_devices()))
        return f"{text} ways on {devices}", ways
    return axes_text((*axes, *[None] * (rank - len(axes)))), ways
