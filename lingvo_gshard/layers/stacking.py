"""Converts trees between the two layouts of a stack of layers, UNROLLED and LOOP.

UNROLLED, a stack's theta has a list `layers` with one item for each layer. As a LOOP it has a list
`block` with one item for each layer of a block, whose arrays are the stacked weights of all
blocks. The functions convert all stacks in a tree: theta, an optimizer's slots, a whole state.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap

_UNROLLED, _LOOP = "layers", "block"


def stacked(tree: NestedMap, block_size: int) -> NestedMap:
    """Converts UNROLLED to LOOP.

    Args:
      tree: a tree of arrays.
      block_size: the layers of a block: 2 with experts, 1 without.

    Returns:
      The tree; its stacks are numpy arrays.

    Raises:
      ValueError: block_size does not divide the number of layers.
    """

    def block(layers: list[NestedMap]) -> list[NestedMap]:
        if len(layers) % block_size:
            raise ValueError(f"stacked: {len(layers)} layers are not a multiple of {block_size}.")
        return [_stack(layers[j::block_size]) for j in range(block_size)]

    return _replaced(tree, _UNROLLED, _LOOP, block)


def unstacked(tree: NestedMap) -> NestedMap:
    """Converts LOOP to UNROLLED, by slicing arrays or tensors; the inverse of `stacked`."""

    def layers(block: list[NestedMap]) -> list[NestedMap]:
        num_blocks = block[0].Flatten()[0].shape[0]
        return [_item(layer, i) for i in range(num_blocks) for layer in block]

    return _replaced(tree, _LOOP, _UNROLLED, layers)


def _stack(layers: list[NestedMap]) -> NestedMap:
    leaves = zip(*(layer.Flatten() for layer in layers), strict=True)
    return layers[0].Pack(np.stack(leaf) for leaf in leaves)


def _item(layer: NestedMap, index: int) -> NestedMap:
    return layer.Transform(lambda stack: stack[index])


def _replaced(node: Any, old: str, new: str, convert: Callable[[list], list]) -> Any:
    """Replaces each list `old` in the tree by a list `new` = convert(old)."""
    if not isinstance(node, NestedMap):
        return node
    result = NestedMap()
    for key, value in node.items():
        if key == old:
            result[new] = convert(value)
        else:
            result[key] = _replaced(value, old, new, convert)
    return result
