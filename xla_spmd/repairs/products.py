"""Products whose tensors do not fit together: XLA's partitioner may add up the wrong sums.

A product has dims of four kinds: of a batch, summed, of the first operand and of the second. Each
of them is in two or three of its tensors. Where these split two or more of the dims differently,
XLA may forget to add up over some devices, or add up parts that belong elsewhere. This is so for
even parts, too:

    lhs[a/x, b/y, c] * rhs[a/x, b, c/y], summed over a, b and c: not added up along x

The operands and the result get placements there that fit together, and Shardy moves them.

A product is repaired if two summed dims are split differently, or if two dims of any kind are and
its tensors are split along more than two axes. These limits are observations. Wrong products had
three summed dims, or were split along three axes. All splits over two axes of mab,abn->mn and
pma,pan->pmn equal NumPy. So XLA is right where experts become groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement, Split
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir

_GENERAL = "stablehlo.dot_general"
PRODUCTS = frozenset([_GENERAL, "stablehlo.dot"])

# The dims of a kind in the first operand, and in the second.
_Dims = tuple[Sequence[int], Sequence[int]]


def is_mismatched(product: Any, places: Sequence[Placement]) -> bool:
    """Returns whether the tensors of a product do not fit together in any of its places."""
    for place in places:
        other, summed = _num_mismatches(product, place)
        if summed > 1 or (other + summed > 1 and _num_axes(place) > 2):
            return True
        if _has_other_parts(product, place):
            return True
    return False


def match(product: Any, places: Sequence[Placement]) -> None:
    """Gives the operands and the result of a product the splits of `places`."""
    with ir.InsertionPoint(product), product.location:
        for number, operand in enumerate(product.operands):
            splits = [place.operands[number] for place in places]
            product.operands[number] = placements.placed(operand, splits)
    placements.place_result(product, [place.results[0] for place in places])


def _has_other_parts(product: Any, place: Placement) -> bool:
    """Returns whether a dim of the batch is split by both operands, differently, by parts of axes.

    XLA ends the process there.
    """
    batch, _ = _batch_and_summed(product)
    for in_lhs, in_rhs in zip(*batch, strict=True):
        splits = (place.operands[0].axes[in_lhs], place.operands[1].axes[in_rhs])
        if all(splits) and splits[0] != splits[1] and ":(" in "".join(splits):
            return True
    return False


def _num_axes(place: Placement) -> int:
    """Returns along how many axes, or parts of axes, the tensors of a product are split."""
    names: set[str] = set()
    for split in (*place.operands, *place.results):
        for axes in split.axes:
            names.update(axes.split(", ") if axes else ())
    return len(names)


def _num_mismatches(product: Any, place: Placement) -> tuple[int, int]:
    """Returns how many dims are split differently by the tensors that have them.

    The first number is of dims of the result, and the second of summed dims.
    """
    lhs, rhs = place.operands
    result = place.results[0]
    batch, summed = _batch_and_summed(product)

    dims: list[list[tuple[Split, int]]] = []
    for i, (in_lhs, in_rhs) in enumerate(zip(*batch, strict=True)):
        dims.append([(lhs, in_lhs), (rhs, in_rhs), (result, i)])

    # The result has the dims of the batch first, then the other ones of each operand.
    in_result = len(batch[0])
    for number, split in enumerate(place.operands):
        rank = len(stablehlo.shape(product.operands[number]))
        for dim in range(rank):
            if dim not in [*batch[number], *summed[number]]:
                dims.append([(split, dim), (result, in_result)])
                in_result += 1

    summed_dims = [[(lhs, i), (rhs, j)] for i, j in zip(*summed, strict=True)]
    return sum(map(_is_mismatched, dims)), sum(map(_is_mismatched, summed_dims))


def _batch_and_summed(product: Any) -> tuple[_Dims, _Dims]:
    """Returns the dims of a product's batch, and its summed dims."""
    if product.name != _GENERAL:  # A matrix or a vector, times another one.
        return ([], []), ([len(stablehlo.shape(product.operands[0])) - 1], [0])
    numbers = jax_private.dimension_numbers(product.attributes["dot_dimension_numbers"])
    return (
        (numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions),
        (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions),
    )


def _is_mismatched(places: Sequence[tuple[Split, int]]) -> bool:
    """Returns whether a dim is split differently in the tensors of its places."""
    parts = set()
    for split, dim in places:
        is_split = split.ways[dim] > 1
        parts.add((split.mesh, split.axes[dim]) if is_split else None)
    return len(parts) > 1
