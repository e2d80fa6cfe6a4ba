"""Placements: how Shardy's propagation would split the operands and results of operations.

The propagation runs on a copy of the program, as XLA reads it: the conversion to HLO folds
operations, such as a reshape of a broadcast, at which the propagation would stop. Operations that
are asked about carry a number, by which they are found in the copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.annotations import sharding_attributes
from xla_spmd.annotations.sharding_attributes import MESH
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir, passmanager, sdy

_NUMBER = "lingvo_gshard.number"
_SHARDING = "sdy.sharding"
# In HLO, a manual computation is a call between these two.
_TO_PART = "xla.sdy.GlobalToLocalShape"
_FROM_PART = "xla.sdy.LocalToGlobalShape"
# Calls are inlined first, as XLA does, since shardings are not propagated into them.
_PROPAGATION = "inline,symbol-dce,sdy-propagation-pipeline"
_RESHARDS = "func.func(sdy-insert-explicit-reshards{enable-full-version=true})"


@dataclasses.dataclass(frozen=True)
class Split:
    """How a tensor is split over a mesh."""

    mesh: str  # The mesh's name in the module.
    axes: tuple[str, ...]  # The axes of each dim, in Shardy's form: `"x", "y":(1)2`.
    ways: tuple[int, ...]  # The number of parts along each dim.

    def whole(self) -> Split:
        """Returns the split in which nothing is split."""
        return self.whole_along(range(len(self.ways)))

    def whole_along(self, dims: Collection[int]) -> Split:
        """Returns the split in which `dims` are whole."""
        axes = tuple("" if dim in dims else names for dim, names in enumerate(self.axes))
        ways = tuple(1 if dim in dims else count for dim, count in enumerate(self.ways))
        return dataclasses.replace(self, axes=axes, ways=ways)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the operands and the results of an operation are split."""

    operands: tuple[Split, ...]
    results: tuple[Split, ...]


def propagated(module: Any, operations: Iterable[Any]) -> list[list[Placement]]:
    """Returns the placements of each operation of an ir.Module, which is left as it is.

    An operation of a function has one placement for each of the function's calls, and none if XLA
    never sees it.
    """
    return _placed(module, operations, f"builtin.module({_PROPAGATION})")


def matched(module: Any, operations: Iterable[Any]) -> list[list[Placement]]:
    """Returns placements like `propagated`, in which operands and results fit together.

    Shardy moves the operands to these placements, and the results from them. Each device then
    computes with its own parts, and sums are added up over devices.
    """
    return _placed(module, operations, f"builtin.module({_PROPAGATION},{_RESHARDS})")


def _placed(module: Any, operations: Iterable[Any], passes: str) -> list[list[Placement]]:
    numbered = list(operations)
    signatures = [_signature(operation) for operation in numbered]
    with _numbers(numbered):
        read = jax_private.through_hlo(module)
    with read.context, ir.Location.unknown():
        _constrain(read.body)
    placements = _found(read.operation, passes, signatures)

    # An operation that became another one, such as a dynamic slice with a constant start.
    if not all(placements):
        with _numbers(numbered):
            copy = module.operation.clone()
        as_written = _found(copy, passes, signatures)
        placements = [exact or other for exact, other in zip(placements, as_written, strict=True)]
    return placements


def _constrain(block: Any) -> None:
    """Rewrites the custom calls by which HLO states placements to Shardy's constraints."""
    for view in list(stablehlo.walk(block)):
        operation = view.operation
        if stablehlo.calls(operation, stablehlo.SHARDING):
            (sharding,) = sdy.TensorShardingPerValueAttr(operation.attributes[_SHARDING]).shardings
            with ir.InsertionPoint(operation):
                constrained = sharding_attributes.constrained(operation.operands[0], sharding)
            operation.results[0].replace_all_uses_with(constrained)
            operation.erase()
        elif stablehlo.calls(operation, _TO_PART):
            with ir.InsertionPoint(operation):
                for number, sharding in enumerate(_boundary(operation, "xla.sdy.in_shardings")):
                    operand = operation.operands[number]
                    constrained = sharding_attributes.constrained(operand, sharding)
                    operation.operands[number] = constrained
        elif stablehlo.calls(operation, _FROM_PART):
            for number, sharding in enumerate(_boundary(operation, "xla.sdy.out_shardings")):
                sharding_attributes.constrain_result(operation, number, sharding)


def _boundary(operation: Any, name: str) -> Sequence[Any]:
    """Returns the shardings of the tensors that enter or leave a manual computation."""
    text = stablehlo.frontend_attributes(operation)[name].value
    return list(sdy.TensorShardingPerValueAttr(ir.Attribute.parse(text)).shardings)


@contextlib.contextmanager
def _numbers(operations: Sequence[Any]) -> Iterator[None]:
    """Gives operations their numbers, as an attribute that HLO keeps, in this context."""
    kept = [stablehlo.frontend_attributes(operation) for operation in operations]
    for number, (operation, attributes) in enumerate(zip(operations, kept, strict=True)):
        numbered = {**attributes, _NUMBER: ir.StringAttr.get(str(number))}
        stablehlo.set_frontend_attributes(operation, numbered)
    try:
        yield
    finally:
        for operation, attributes in zip(operations, kept, strict=True):
            stablehlo.set_frontend_attributes(operation, attributes)


def _signature(operation: Any) -> tuple[str, ...]:
    """Returns the name of an operation, and the shapes of its operands and results."""
    values = [*operation.operands, *operation.results]
    return (operation.name, *(str(stablehlo.shape(value)) for value in values))


def _found(
    program: Any, passes: str, signatures: Sequence[tuple[str, ...]]
) -> list[list[Placement]]:
    """Runs passes on a program, and returns the placements of the operations with numbers.

    The conversion to HLO hands a number on to what an operation becomes, which may have another of
    these `signatures`. Such an operation is left out.
    """
    with program.context, ir.Location.unknown():
        passmanager.PassManager.parse(passes).run(program)
    block = program.regions[0].blocks[0]
    meshes = {}
    for view in block.operations:
        if isinstance(view, sdy.MeshOp):
            axes = sdy.MeshAttr(view.operation.attributes["mesh"]).axes
            sizes = {sdy.MeshAxisAttr(axis).name: sdy.MeshAxisAttr(axis).size for axis in axes}
            meshes[view.operation.attributes["sym_name"].value] = sizes

    placements: list[list[Placement]] = [[] for _ in signatures]
    for view in stablehlo.walk(block):
        operation = view.operation
        number = stablehlo.frontend_attributes(operation).get(_NUMBER)
        if number is not None and _signature(operation) == signatures[int(number.value)]:
            operands = tuple(_split(value, meshes) for value in operation.operands)
            results = tuple(_split(value, meshes) for value in operation.results)
            placements[int(number.value)].append(Placement(operands, results))
    return placements


def placed(value: Any, splits: Sequence[Split]) -> Any:
    """Returns a tensor that is split in this way, by a constraint at the insertion point.

    `splits` has the tensor's split in each call of its function. If they differ, it is made whole.
    """
    return sharding_attributes.constrained(value, _common(splits))


def place_result(operation: Any, splits: Sequence[Split], number: int = 0) -> None:
    """Splits a result of an operation in this way, for all that use it."""
    sharding_attributes.constrain_result(operation, number, _common(splits))


def _common(splits: Sequence[Split]) -> Any:
    """Returns the attribute of a split, or of a whole tensor if they differ."""
    split = splits[0]
    if any(other != split for other in splits):
        split = split.whole()
    text = sharding_attributes.text(split.mesh, split.axes, len(split.axes))
    return sharding_attributes.sharding(text)


def unsplit(value: Any, dims: Collection[int], splits: Sequence[Split]) -> Any:
    """Returns a tensor that is whole along `dims`, by a constraint at the insertion point.

    `splits` has the tensor's split in each call of its function. Its other dims keep their split if
    all calls agree.
    """
    return placed(value, [split.whole_along(dims) for split in splits])


def unsplit_result(operation: Any, dims: Collection[int], splits: Sequence[Split]) -> None:
    """Keeps the first result of an operation whole along `dims`, for all that use it."""
    place_result(operation, [split.whole_along(dims) for split in splits])


def keep_in_order(operation: Any, places: Sequence[Placement]) -> bool:
    """Makes an operation's tensors whole if any is split over devices in another order.

    Returns whether there are any.
    """
    splits = [split for place in places for split in place.operands + place.results]
    if not any(split.mesh != MESH and max(split.ways, default=1) > 1 for split in splits):
        return False

    for number, operand in enumerate(operation.operands):
        whole = [place.operands[number].whole() for place in places]
        operation.operands[number] = placed(operand, whole)
    for number in range(len(operation.results)):
        place_result(operation, [place.results[number].whole() for place in places], number)
    return True


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
    # Constraints and reshards have the first, and Shardy's collectives the second.
    for name in ("sharding", "out_sharding"):
        if operation.name.startswith("sdy.") and name in attributes:
            return attributes[name]
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
