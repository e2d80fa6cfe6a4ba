"""Shardy's annotations in place of GSPMD's: one pass over a program that TensorFlow has lowered.

TensorFlow annotates a tensor by a call of `Sharding`, and begins and ends a manual region by calls
of `SPMDFullToShardShape` and `SPMDShardToFullShape`. All three are GSPMD's, whose propagation XLA
is removing. The pass replaces them by Shardy's sdy.sharding_constraint and sdy.manual_computation
(manual_regions.py), whose shardings name the axes of the program's mesh.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.annotations import manual_regions, sharding_attributes
from xla_spmd.annotations.sharding_attributes import ShardingAttributes
from xla_spmd.mesh import Mesh
from xla_spmd.repairs import uneven_parts
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir, passmanager

_GSPMD_CALLS = (stablehlo.SHARDING, stablehlo.FULL_TO_SHARD, stablehlo.SHARD_TO_FULL)


def annotated(what: str, exported: bytes, mesh: Mesh) -> bytes:
    """Returns a serialized export with Shardy's annotations in place of GSPMD's.

    Raises ValueError, prefixed by `what`, if an annotation is neither replicated nor tiled over all
    devices of the mesh, if a partition's part leaves a manual region unconverted, if the size of a
    tensor depends on values and there are several devices, and if this JAX cannot read the export.
    """
    program = jax_private.deserialized(what, exported)
    module = jax_private.stablehlo_module(program.mlir_module_serialized)
    with module.context, ir.Location.unknown():
        _rewrite(module, ShardingAttributes(what, module, mesh))
    return bytes(jax_private.with_module(program, module).serialize())


def of_gspmd(what: str, module: Any, num_partitions: int) -> Any:
    """Returns a copy of somebody else's ir.Module with Shardy's annotations in place of GSPMD's.

    Its mesh has one axis, and the annotations use parts of it. Raises ValueError if an annotation
    is neither replicated nor tiled over all devices, such as an annotation of a single device, if
    a partition's part enters or leaves a manual region without a conversion, and if the size of a
    tensor depends on values and there are several devices.
    """
    copy = jax_private.stablehlo_module(jax_private.bytecode(module))
    mesh = Mesh.flat(num_partitions)
    with copy.context, ir.Location.unknown():
        attributes = ShardingAttributes(what, copy, mesh)
        for view in list(stablehlo.walk(copy.body)):
            operation = view.operation
            if operation.name == "func.func":
                values = operation.regions[0].blocks[0].arguments
                _rename(operation, "arg_attrs", values, attributes)
                ends = operation.regions[0].blocks[0].operations
                _rename(operation, "res_attrs", ends[len(ends) - 1].operands, attributes)
            elif sharding_attributes.GSPMD in operation.attributes:
                _rename_results(operation, attributes)
        _rewrite(copy, attributes)
    return copy


def _rename(
    function: Any, name: str, values: Sequence[Any], attributes: ShardingAttributes
) -> None:
    """Gives the arguments or results of a function Shardy's shardings in place of GSPMD's."""
    if name not in function.attributes:
        return
    renamed = []
    for value, entry in zip(values, function.attributes[name], strict=True):
        named = {entry[i].name: entry[i].attr for i in range(len(entry))}
        if sharding_attributes.GSPMD in named:
            text = named.pop(sharding_attributes.GSPMD).value
            sharding = attributes.of_text(text, value, value)
            named["sdy.sharding"] = sharding_attributes.sharding(sharding)
        renamed.append(ir.DictAttr.get(named))
    function.attributes[name] = ir.ArrayAttr.get(renamed)


def _rename_results(operation: Any, attributes: ShardingAttributes) -> None:
    """Gives the results of an operation Shardy's shardings, unless a pass reads GSPMD's."""
    if stablehlo.calls(operation, *_GSPMD_CALLS):
        return
    text = operation.attributes[sharding_attributes.GSPMD].value
    del operation.attributes[sharding_attributes.GSPMD]

    # Several results have a list of annotations.
    texts = [text]
    if text.startswith("{{"):
        texts = re.findall(r"\{[^{}]*\}", text)
    if set(texts) == {"{manual}"}:  # The operation is in a manual region.
        return

    shardings = []
    for value, own_text in zip(operation.results, texts, strict=True):
        shardings.append(attributes.of_text(own_text, value, value))
    operation.attributes["sdy.sharding"] = sharding_attributes.shardings(shardings)


def _rewrite(module: Any, attributes: ShardingAttributes) -> None:
    """Rewrites the annotations of an ir.Module in place, and repairs its operators."""
    # TensorFlow leaves the bodies of loops as functions that nobody calls.
    passmanager.PassManager.parse("builtin.module(symbol-dce)").run(module.operation)

    for function in module.body.operations:
        if function.operation.name == "func.func":
            for block in function.operation.regions[0].blocks:
                manual_regions.outline(block, attributes)
                _constrain(block, attributes)
    if attributes.mesh.num_partitions > 1:
        _check_static(attributes.what, module)
        uneven_parts.repair(attributes.what, module, attributes.mesh.num_partitions)


def _check_static(what: str, module: Any) -> None:
    """Raises ValueError for a tensor of an ir.Module whose size depends on values."""
    for view in stablehlo.walk(module.body):
        for value in view.operation.results:
            if "?" in str(value.type).partition("#")[0]:
                raise ValueError(
                    f"{what}: {sharding_attributes.location(value)} has a size that depends on "
                    f"values, {value.type}; several devices need fixed sizes. In TensorFlow, "
                    "such sizes come from tf.where(x), tf.boolean_mask and tf.unique, and from the "
                    "gradient of a tf.gather from a tf.concat, where a product with a one-hot "
                    "matrix can take its place."
                )


def _constrain(block: Any, attributes: ShardingAttributes) -> None:
    """Rewrites the annotations of a block, and of all blocks inside it, to constraints."""
    for view in list(stablehlo.walk(block)):
        operation = view.operation
        if not stablehlo.calls(operation, stablehlo.SHARDING):
            continue

        # A single device holds everything, so the annotation can be dropped.
        value = operation.operands[0]
        if attributes.mesh.num_partitions > 1:
            sharding = sharding_attributes.sharding(attributes.of_call(operation))
            with ir.InsertionPoint(operation), operation.location:
                value = sharding_attributes.constrained(value, sharding)
        operation.results[0].replace_all_uses_with(value)
        operation.erase()
