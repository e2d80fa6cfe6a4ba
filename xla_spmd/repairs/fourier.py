"""Fourier transforms, which XLA's CPU backend cannot execute in every layout and placement.

A transform along a split dim, even or not, is refused by the compiler, so the transformed dims are
kept whole. And the CPU backend transforms only tensors whose first dim is the slowest in memory.
Around collectives the compiler prefers other orders, and gives them to a transform nearby; calling
the program then fails. So the operand and the result are constrained to that order. Constraints of
their sharding stand outside, since a collective between them and the transform would undo it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement
from xla_spmd.runtime.jax_private import ir

TRANSFORM = "stablehlo.fft"
_CONSTRAINT = "LayoutConstraint"  # XLA's custom call: an identity with a layout.


def keep_executable(transform: Any, places: Sequence[Placement] = ()) -> None:
    """Fixes the layout of a transform and, unless `places` is empty, its split.

    In a manual region, `places` is empty.
    """
    (result,) = transform.results
    splits = [place.results[0] for place in places]
    num_transformed = len(ir.DenseI64ArrayAttr(transform.attributes["fft_length"]))
    rank = len(stablehlo.shape(result))
    transformed = range(rank - num_transformed, rank)

    with ir.InsertionPoint(transform), transform.location:
        operand = transform.operands[0]
        if places:
            operand = placements.unsplit(operand, transformed, splits)
        transform.operands[0] = _row_major(operand)

    users = [use.owner.operation for use in result.uses]
    with ir.InsertionPoint.after(transform), transform.location:
        ordered = _row_major(result)
        if places:
            ordered = placements.unsplit(ordered, transformed, splits)
    for user in users:
        for i, value in enumerate(user.operands):
            if value == result:
                user.operands[i] = ordered


def _row_major(value: Any) -> Any:
    """Returns a tensor with a constraint of its layout, at the insertion point.

    TPUs do not allow complex numbers in such a constraint, only their two parts.
    """
    element = ir.RankedTensorType(value.type).element_type
    if not str(element).startswith("complex"):
        return _constrained(value)

    shape = stablehlo.shape(value)
    part = ir.RankedTensorType.get(shape, ir.ComplexType(element).element_type)
    parts = []
    for name in ("stablehlo.real", "stablehlo.imag"):
        operation = ir.Operation.create(name, results=[part], operands=[value])
        parts.append(_constrained(operation.results[0]))
    return ir.Operation.create("stablehlo.complex", results=[value.type], operands=parts).results[0]


def _constrained(value: Any) -> Any:
    rank = len(stablehlo.shape(value))
    order = ", ".join(str(dim) for dim in reversed(range(rank)))
    layouts = ir.ArrayAttr.get([ir.Attribute.parse(f"dense<[{order}]> : tensor<{rank}xindex>")])
    return ir.Operation.create(
        "stablehlo.custom_call",
        results=[value.type],
        operands=[value],
        attributes={
            "call_target_name": ir.StringAttr.get(_CONSTRAINT),
            "operand_layouts": layouts,
            "result_layouts": layouts,
        },
    ).results[0]
