"""The same weights for layers one after the other and for layers as a loop.

UNROLLED, a stack's theta has a list `layers`, one item a layer. As a LOOP it has a list `block`
of one item a layer of the block, whose arrays are the weights of all blocks stacked. These turn
one into the other anywhere in a tree: theta, an optimizer's slots, a whole state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap

_UNROLLED, _LOOP = "layers", "block"


def stacked(tree: NestedMap, block_size: int) -> NestedMap:
    """UNROLLED to LOOP.

    Args:
      tree: of arrays.
      block_size: layers of a block: 2 with experts, 1 without.

    Returns:
      The tree with numpy arrays where there are stacks.

    Raises:
      ValueError: a list of layers is not made of whole blocks.
    """

    def block(layers: list[NestedMap]) -> list[NestedMap]:
        if len(layers) % block_size:
            raise ValueError(f"stacked: {len(layers)} layers, no multiple of {block_size}.")
        return [_zipped(layers[j::block_size]) for j in range(block_size)]

    return _replaced(tree, _UNROLLED, _LOOP, block)


def unstacked(tree: NestedMap) -> NestedMap:
    """LOOP to UNROLLED, the inverse of `stacked`, by slices of the arrays or tensors."""

    def layers(block: list[NestedMap]) -> list[NestedMap]:
        num_blocks = block[0].Flatten()[0].shape[0]
        return [_sliced(layer, i) for i in range(num_blocks) for layer in block]

    return _replaced(tree, _LOOP, _UNROLLED, layers)


def _zipped(layers: list[NestedMap]) -> NestedMap:
    leaves = zip(*(layer.Flatten() for layer in layers), strict=True)
    return layers[0].Pack(np.stack(leaf) for leaf in leaves)


def _sliced(layer: NestedMap, index: int) -> NestedMap:
    return layer.Transform(lambda stack: stack[index])


def _replaced(node: Any, old: str, new: str, convert: Callable[[list], list]) -> Any:
    """The tree with `new` = convert(`old`) in place of every `old`."""
    if not isinstance(node, NestedMap):
        return node
    result = NestedMap()
    for key, value in node.items():
        if key == old:
            result[new] = convert(value)
        else:
            result[key] = _replaced(value, old, new, convert)
    return result
