"""Products whose summed dims are split over devices that are not along the axes of the mesh.

Where a tensor of a product is split over a part of an axis, or over devices in another order, XLA
may add up partial sums of wrong devices. The summed dims are kept whole there. Products along
whole axes of the program's own mesh are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement
from xla_spmd.runtime import jax_private

PRODUCT = "stablehlo.dot_general"


def keep_summed(product: Any, places: Sequence[Placement]) -> bool:
    """Keeps the summed dims of a product whole if XLA is wrong; returns whether it changed any."""
    numbers = jax_private.dimension_numbers(product.attributes["dot_dimension_numbers"])
    if not any(placements.is_off_axes(place) for place in places):
        return False

    is_changed = False
    both = (numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions)
    for number, dims in enumerate(both):
        splits = [place.operands[number] for place in places]
        if any(split.ways[dim] > 1 for split in splits for dim in dims):
            product.operands[number] = placements.unsplit(product.operands[number], dims, splits)
            is_changed = True
    return is_changed
