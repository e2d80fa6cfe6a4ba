"""Reshapes to fewer dims that divide a dim in uneven parts: XLA's partitioner ends the process.

This happens where the result is split, too, such as (1, 25, 1) to (5, 5) in two parts. The dim is
kept whole there.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement

RESHAPE = "stablehlo.reshape"


def divided_dims(reshape: Any) -> set[int]:
    """Returns the dims that a stablehlo.reshape to fewer dims divides."""
    operand = stablehlo.shape(reshape.operands[0])
    result = stablehlo.shape(reshape.results[0])
    if len(result) >= len(operand):
        return set()

    begins = list(itertools.accumulate(result, operator.mul))
    divided = set()
    slower = 1  # The number of elements along the dims so far.
    for dim, size in enumerate(operand):
        if any(slower < begin < slower * size for begin in begins):
            divided.add(dim)
        slower *= size
    return divided


def keep_whole(reshape: Any, places: Sequence[Placement]) -> bool:
    """Keeps the divided dims whole that are split unevenly; returns whether there are any."""
    operand = reshape.operands[0]
    uneven = set()
    for place in places:
        is_result_split = max(place.results[0].ways, default=1) > 1
        for dim in divided_dims(reshape):
            size = stablehlo.shape(operand)[dim]
            if is_result_split and size % place.operands[0].ways[dim]:
                uneven.add(dim)
    if not uneven:
        return False

    splits = [place.operands[0] for place in places]
    reshape.operands[0] = placements.unsplit(operand, uneven, splits)
    return True
