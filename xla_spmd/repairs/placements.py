"""Placements: how Shardy's propagation would split the operands and results of operations.

The propagation runs on a copy of the program, with the passes that XLA itself runs. Operations that
are asked about carry a number, by which they are found in the copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.annotations import sharding_attributes
from xla_spmd.annotations.sharding_attributes import MESH
from xla_spmd.runtime.jax_private import ir, passmanager, sdy

_NUMBER = "lingvo_gshard.number"
_SHARDING = "sdy.sharding"
# Calls are inlined first, as XLA does, since shardings are not propagated into them.
_PASSES = "builtin.module(inline,symbol-dce,sdy-propagation-pipeline)"


@dataclasses.dataclass(frozen=True)
class Split:
    """How a tensor is split over a mesh."""

    mesh: str  # The mesh's name in the module.
    axes: tuple[str, ...]  # The axes of each dim, in Shardy's form: `"x", "y":(1)2`.
    ways: tuple[int, ...]  # The number of parts along each dim.


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the operands and the results of an operation are split."""

    operands: tuple[Split, ...]
    results: tuple[Split, ...]


def propagated(module: Any, operations: Iterable[Any]) -> list[list[Placement]]:
    """Returns the placements of each operation of an ir.Module, which is left as it is.

    An operation of a function has one placement for each of the function's calls.
    """
    numbered = list(operations)
    integer = ir.IntegerType.get_signless(64)
    for number, operation in enumerate(numbered):
        operation.attributes[_NUMBER] = ir.IntegerAttr.get(integer, number)
    copy = module.operation.clone()
    for operation in numbered:
        del operation.attributes[_NUMBER]

    block = copy.regions[0].blocks[0]
    _drop_reshapes(block)
    passmanager.PassManager.parse(_PASSES).run(copy)
    meshes = {}
    for view in block.operations:
        if isinstance(view, sdy.MeshOp):
            axes = sdy.MeshAttr(view.operation.attributes["mesh"]).axes
            sizes = {sdy.MeshAxisAttr(axis).name: sdy.MeshAxisAttr(axis).size for axis in axes}
            meshes[view.operation.attributes["sym_name"].value] = sizes

    placements: list[list[Placement]] = [[] for _ in numbered]
    for view in stablehlo.walk(block):
        operation = view.operation
        if _NUMBER in operation.attributes:
            operands = tuple(_split(value, meshes) for value in operation.operands)
            results = tuple(_split(value, meshes) for value in operation.results)
            number = ir.IntegerAttr(operation.attributes[_NUMBER]).value
            placements[number].append(Placement(operands, results))
    return placements


def _drop_reshapes(block: Any) -> None:
    """Removes the reshapes to the same shape, as XLA does, since a dim of size 1 stops at them."""
    for view in list(stablehlo.walk(block)):
        operation = view.operation
        if operation.name == "stablehlo.reshape":
            (operand,) = operation.operands
            (result,) = operation.results
            if operand.type == result.type:
                result.replace_all_uses_with(operand)
                operation.erase()


def unsplit(value: Any, dims: Collection[int], splits: Sequence[Split]) -> Any:
    """Returns a tensor that is whole along `dims`, by a constraint at the insertion point.

    `splits` are of its places. Its other dims stay as they are, if that is the same in all places.
    """
    split = splits[0]
    axes = ["" if dim in dims else names for dim, names in enumerate(split.axes)]
    if any(other != split for other in splits):
        axes = [""] * len(axes)
    text = sharding_attributes.text(split.mesh, axes, len(axes))
    return sharding_attributes.constrained(value, text)


def unsplit_result(operation: Any, dims: Collection[int], splits: Sequence[Split]) -> None:
    """Keeps the only result of an operation whole along `dims`, for all that use it."""
    (result,) = operation.results
    whole = unsplit(result, dims, splits)
    constraint = whole.owner.operation
    constraint.move_after(operation)
    result.replace_all_uses_except(whole, constraint)


def is_off_axes(place: Placement) -> bool:
    """Returns whether a tensor is split over a part of an axis, or over another mesh."""
    for split in (*place.operands, *place.results):
        is_split = max(split.ways, default=1) > 1
        has_part = any(":(" in axes for axes in split.axes)
        if is_split and (has_part or split.mesh != MESH):
            return True
    return False


def _split(value: Any, meshes: dict[str, dict[str, int]]) -> Split:
    """Returns how a value is split."""
    rank = len(stablehlo.shape(value))
    attribute = _sharding(value)
    if attribute is None:
        return Split(MESH, ("",) * rank, (1,) * rank)

    sharding = sdy.TensorShardingAttr(attribute)
    mesh = ir.FlatSymbolRefAttr(sharding.mesh_or_ref).value
    texts = []
    ways = []
    for dim in sharding.dimension_shardings:
        names = []
        num_parts = 1
        for reference in sdy.DimensionShardingAttr(dim).axes:
            axis = sdy.AxisRefAttr(reference)
            if axis.sub_axis_info is None:
                names.append(f'"{axis.name}"')
                num_parts *= meshes[mesh][axis.name]
            else:
                part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
                names.append(f'"{axis.name}":({part.pre_size}){part.size}')
                num_parts *= part.size
        texts.append(", ".join(names))
        ways.append(num_parts)
    return Split(mesh, tuple(texts), tuple(ways))


def _sharding(value: Any) -> Any | None:
    """Returns the attribute of a value's sharding; None without one."""
    if isinstance(value.owner, ir.Block):
        return _sharding_of_argument(value)

    operation = value.owner
    attributes = operation.attributes
    if operation.name in ("sdy.sharding_constraint", "sdy.reshard"):
        return attributes["sharding"]
    name = "out_shardings" if operation.name == "sdy.manual_computation" else _SHARDING
    if name not in attributes:
        return None
    return sdy.TensorShardingPerValueAttr(attributes[name]).shardings[
        ir.OpResult(value).result_number
    ]


def _sharding_of_argument(value: Any) -> Any | None:
    """Returns the attribute of the sharding of a block's argument; None without one."""
    parent = value.owner.owner.operation
    number = ir.BlockArgument(value).arg_number
    if parent.name == "func.func":
        if "arg_attrs" not in parent.attributes:
            return None
        attributes = ir.DictAttr(ir.ArrayAttr(parent.attributes["arg_attrs"])[number])
        return attributes[_SHARDING] if _SHARDING in attributes else None

    # A loop splits its argument as it splits the result of the same number.
    if _SHARDING not in parent.attributes:
        return None
    return sdy.TensorShardingPerValueAttr(parent.attributes[_SHARDING]).shardings[number]
