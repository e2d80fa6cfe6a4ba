"""Products whose tensors do not fit together: XLA's partitioner may add up the wrong sums.

A product has dims of four kinds: of a batch, summed, of the first operand and of the second. Each
of them is in two or three of its tensors. Where these split two and more of the dims differently,
XLA may forget to add up over some devices, or add up parts that belong elsewhere. This is so for
even parts, and along the axes of one mesh:

    lhs[a/x, b/y, c] * rhs[a/x, b, c/y], summed over a, b and c: not added up along x

The operands and the result get placements there that fit together, and Shardy moves them. With one
such dim, XLA is right, as in nearly all products of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement, Split
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir

PRODUCT = "stablehlo.dot_general"


def is_mismatched(product: Any, places: Sequence[Placement]) -> bool:
    """Returns whether the tensors of a product split two or more dims differently in any place."""
    return any(_num_mismatches(product, place) > 1 for place in places)


def match(product: Any, places: Sequence[Placement]) -> None:
    """Gives the operands and the result of a product the splits of `places`."""
    with ir.InsertionPoint(product), product.location:
        for number, operand in enumerate(product.operands):
            splits = [place.operands[number] for place in places]
            product.operands[number] = placements.placed(operand, splits)
    placements.place_result(product, [place.results[0] for place in places])


def _num_mismatches(product: Any, place: Placement) -> int:
    """Returns how many dims are split differently by the tensors that have them."""
    numbers = jax_private.dimension_numbers(product.attributes["dot_dimension_numbers"])
    lhs, rhs = place.operands
    result = place.results[0]
    batch = (numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions)
    summed = (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions)

    dims: list[list[tuple[Split, int]]] = []
    for i, (in_lhs, in_rhs) in enumerate(zip(*batch, strict=True)):
        dims.append([(lhs, in_lhs), (rhs, in_rhs), (result, i)])
    for in_lhs, in_rhs in zip(*summed, strict=True):
        dims.append([(lhs, in_lhs), (rhs, in_rhs)])

    # The result has the dims of the batch first, then the other ones of each operand.
    in_result = len(batch[0])
    for number, split in enumerate(place.operands):
        rank = len(stablehlo.shape(product.operands[number]))
        for dim in range(rank):
            if dim not in [*batch[number], *summed[number]]:
                dims.append([(split, dim), (result, in_result)])
                in_result += 1

    num_mismatches = 0
    for places in dims:
        parts = {(split.mesh, split.axes[dim]) for split, dim in places if split.ways[dim] > 1}
        is_split_everywhere = all(split.ways[dim] > 1 for split, dim in places)
        num_mismatches += len(parts) > 1 or (len(parts) == 1 and not is_split_everywhere)
    return num_mismatches
