"""Model flops: the floating-point operations that a training step mathematically needs.

They count only the matrix products, with each token's experts. They leave out the rest of a
program's work: unused capacity, dispatch and combine by einsum, softmaxes, the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lingvo_gshard.model.step_products import Place, StepProduct
from lingvo_gshard.sharding.layout import is_weight


def step_flops(products: Sequence[StepProduct]) -> float:
    """Returns the operations of a step, forward and backward, given its forward products."""
    # Layers with experts have tokens in groups.
    group_sizes = {}
    for product in products:
        if "S" in product.sizes:
            group_sizes[product.place] = product.sizes["S"]

    flops = 0.0
    for product in products:
        if _is_needed(product):
            # A multiplication and an addition for each element of the space of all letters.
            operations = 2.0 * product.times * math.prod(product.sizes.values())
            flops += operations * _share_used(product, group_sizes)
    return 3 * flops  # Backward takes twice forward.


def _is_needed(product: StepProduct) -> bool:
    """Whether the mathematics has a product: not a lookup, a norm's scale or a one-hot mask."""
    equation = product.equation
    if product.is_lookup or not equation.contracted:
        return False
    is_mask = {"S", "C"} <= set(equation.left)
    return is_weight(equation.right) or not is_mask


def _share_used(product: StepProduct, group_sizes: Mapping[Place, float]) -> float:
    """Returns the share of a product's rows that tokens need; experts have unused places."""
    if product.weight is None:
        return 1.0
    share = product.weight.share_used
    group_size = group_sizes.get(product.place)
    if group_size is None or not {"E", "C"} <= product.sizes.keys():
        return share
    return share * group_size / product.sizes["C"]
