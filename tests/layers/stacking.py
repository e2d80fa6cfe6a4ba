"""Converts trees between the layouts of a stack of layers: UNROLLED `layers`, LOOP `block`."""

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap


def stacked(tree, block_size):
    """Stacks the weights of each layer of a block over the blocks, in all stacks of the tree."""

    def block(layers):
        assert len(layers) % block_size == 0
        return [_stack(layers[j::block_size]) for j in range(block_size)]

    return _replaced(tree, "layers", "block", block)


def unstacked(tree):
    """The inverse of `stacked`."""

    def layers(block):
        num_blocks = len(block[0].Flatten()[0])
        return [layer.Transform(lambda x, i=i: x[i]) for i in range(num_blocks) for layer in block]

    return _replaced(tree, "block", "layers", layers)


def _stack(layers):
    leaves = zip(*(layer.Flatten() for layer in layers), strict=True)
    return layers[0].Pack(np.stack(leaf) for leaf in leaves)


def _replaced(node, old, new, convert):
    if not isinstance(node, NestedMap):
        return node
    return NestedMap(
        {
            new if key == old else key: convert(value)
            if key == old
            else _replaced(value, old, new, convert)
            for key, value in node.items()
        }
    )
