"""Scatters whose rows are split unevenly: XLA's partitioner scatters rows of padding, too.

Where the devices do not divide the rows, XLA pads them with zeros, and row 0 of the result gets
these. So the rows are padded to a multiple of their parts here, with indices that are out of
bounds, which a scatter skips.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir

SCATTER = "stablehlo.scatter"


@dataclasses.dataclass(frozen=True)
class _RowDim:
    """A dim of a scatter's rows: its place in the updates and in the indices, and its size."""

    in_updates: int
    in_indices: int
    size: int


def pad(scatter: Any, places: Sequence[Placement]) -> bool:
    """Pads the rows of a scatter that are split unevenly; returns whether there are any.

    A dim that would become more than twice as large is kept whole instead, and so is any dim if no
    index is out of bounds.
    """
    # The operands are the inputs, the indices, and as many updates as inputs.
    num_inputs = (len(scatter.operands) - 1) // 2
    has_free_index = _has_free_index(scatter, num_inputs)
    padding: dict[_RowDim, int] = {}
    whole: list[_RowDim] = []
    for dim in _row_dims(scatter):
        ways = 1
        for place in places:
            ways = math.lcm(ways, place.operands[num_inputs].ways[dim.in_indices])
            for updates in place.operands[num_inputs + 1 :]:
                ways = math.lcm(ways, updates.ways[dim.in_updates])

        missing = -dim.size % ways
        if missing > dim.size or (missing and not has_free_index):
            whole.append(dim)
        elif missing:
            padding[dim] = missing
    if not padding and not whole:
        return False

    for i, operand in list(enumerate(scatter.operands))[num_inputs:]:
        is_indices = i == num_inputs
        unsplit = [dim.in_indices if is_indices else dim.in_updates for dim in whole]
        counts = {}
        for dim, missing in padding.items():
            counts[dim.in_indices if is_indices else dim.in_updates] = missing
        if unsplit:
            operand = placements.unsplit(operand, unsplit, [place.operands[i] for place in places])
        if counts:
            operand = _padded(operand, counts, -1 if is_indices else 0)
        scatter.operands[i] = operand

    if padding:
        _withdraw_promises(scatter)
    return True


def _withdraw_promises(scatter: Any) -> None:
    """Says that indices may be unsorted and repeated: several of -1 follow larger ones."""
    for promise in ("indices_are_sorted", "unique_indices"):
        if promise in scatter.attributes:
            scatter.attributes[promise] = ir.BoolAttr.get(False)


def _has_free_index(scatter: Any, num_inputs: int) -> bool:
    """Returns whether the type of the indices has a number that is out of bounds.

    An unsigned type lacks such a number if the input has as many elements along a dim as the type
    has numbers. Indices of no dim are never out of bounds.
    """
    numbers = jax_private.dimension_numbers(scatter.attributes["scatter_dimension_numbers"])
    if not numbers.scattered_dims_to_operand_dims:
        return False
    element = str(ir.RankedTensorType(scatter.operands[num_inputs].type).element_type)
    if not element.startswith("ui"):
        return True
    return max(stablehlo.shape(scatter.operands[0]), default=0) < 2 ** int(element[2:])


def _row_dims(scatter: Any) -> list[_RowDim]:
    """Returns the dims of the rows of a scatter, without its batch dims.

    The input has the batch dims, too, and XLA rounds them up alike.
    """
    numbers = jax_private.dimension_numbers(scatter.attributes["scatter_dimension_numbers"])
    num_inputs = (len(scatter.operands) - 1) // 2
    indices = scatter.operands[num_inputs]
    updates_shape = stablehlo.shape(scatter.operands[num_inputs + 1])

    # Both list the dims of the rows in the same order, each among dims of its own.
    in_updates = [i for i in range(len(updates_shape)) if i not in numbers.update_window_dims]
    rank = len(stablehlo.shape(indices))
    in_indices = [i for i in range(rank) if i != numbers.index_vector_dim]
    dims = []
    for update_dim, index_dim in zip(in_updates, in_indices, strict=True):
        if index_dim not in numbers.scatter_indices_batching_dims:
            dims.append(_RowDim(update_dim, index_dim, updates_shape[update_dim]))
    return dims


def _padded(value: Any, counts: dict[int, int], fill: int) -> Any:
    """Returns a tensor with `counts` elements of `fill` at the end of each dim."""
    shape = stablehlo.shape(value)
    missing = [counts.get(i, 0) for i in range(len(shape))]
    element = ir.RankedTensorType(value.type).element_type
    padded_type = ir.RankedTensorType.get(
        [size + count for size, count in zip(shape, missing, strict=True)], element
    )
    filling = ir.Operation.create(
        "stablehlo.constant",
        results=[ir.RankedTensorType.get([], element)],
        attributes={"value": _scalar(element, fill)},
    )
    padded = ir.Operation.create(
        "stablehlo.pad",
        results=[padded_type],
        operands=[value, filling.results[0]],
        attributes={
            "edge_padding_low": ir.DenseI64ArrayAttr.get([0] * len(shape)),
            "edge_padding_high": ir.DenseI64ArrayAttr.get(missing),
            "interior_padding": ir.DenseI64ArrayAttr.get([0] * len(shape)),
        },
    )
    return padded.results[0]


def _scalar(element: Any, fill: int) -> Any:
    """Returns the attribute of a constant of this type; -1 is the largest unsigned number."""
    name = str(element)
    if name == "i1":
        text = "false"
    elif name.startswith("complex"):
        text = f"({fill}.0, {fill}.0)"
    elif name.startswith("ui"):
        text = str(fill % 2 ** int(name[2:]))
    elif name.startswith("i"):
        text = str(fill)
    else:
        text = f"{fill}.0"
    return ir.Attribute.parse(f"dense<{text}> : tensor<{name}>")
