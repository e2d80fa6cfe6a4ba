"""Gathers whose rows are split unevenly: XLA's partitioner takes parts of other shapes for them.

The rows are the dims of the indices that choose slices, and the same dims of the result. If the
indices split one of them, the indices or the result split one unevenly, and the two are not split
alike, XLA fails in its own verifier. So the indices are kept whole there: a row of them is a few
integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement
from xla_spmd.runtime import jax_private

GATHER = "stablehlo.gather"


def keep_indices(gather: Any, places: Sequence[Placement]) -> bool:
    """Keeps the indices of a gather whole if XLA fails otherwise; returns whether it does."""
    rows = _rows(gather)
    if not any(_fails(gather, rows, place) for place in places):
        return False
    splits = [place.operands[1] for place in places]
    gather.operands[1] = placements.unsplit(gather.operands[1], [dim for dim, _ in rows], splits)
    return True


def _rows(gather: Any) -> list[tuple[int, int]]:
    """Returns the dims of the rows, each by its place in the indices and in the result."""
    numbers = jax_private.dimension_numbers(gather.attributes["dimension_numbers"])
    indices_rank = len(stablehlo.shape(gather.operands[1]))
    result_rank = len(stablehlo.shape(gather.results[0]))
    in_indices = [dim for dim in range(indices_rank) if dim != numbers.index_vector_dim]
    in_result = [dim for dim in range(result_rank) if dim not in numbers.offset_dims]
    return list(zip(in_indices, in_result, strict=True))


def _fails(gather: Any, rows: Sequence[tuple[int, int]], place: Placement) -> bool:
    """Returns whether the indices are split, some rows unevenly, and the result otherwise."""
    sizes = stablehlo.shape(gather.results[0])
    indices = place.operands[1]
    result = place.results[0]
    indices_are_split = False
    is_uneven = False
    is_alike = True
    for in_indices, in_result in rows:
        ways = (indices.ways[in_indices], result.ways[in_result])
        indices_are_split |= ways[0] > 1
        is_uneven |= any(sizes[in_result] % count for count in ways)
        is_alike &= indices.axes[in_indices] == result.axes[in_result]
    return indices_are_split and is_uneven and not (is_alike and indices.mesh == result.mesh)
