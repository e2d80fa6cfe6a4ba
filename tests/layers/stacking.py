"""Converts trees between the layouts of a stack of layers: UNROLLED `layers`, LOOP `block`."""

import operator

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
        taken_apart = []
        for i in range(num_blocks):
            taken_apart += [layer.Transform(operator.itemgetter(i)) for layer in block]
        return taken_apart

    return _replaced(tree, "block", "layers", layers)


def _stack(layers):
    leaves = zip(*(layer.Flatten() for layer in layers), strict=True)
    return layers[0].Pack(np.stack(leaf) for leaf in leaves)


def _replaced(node, old, new, convert):
    if not isinstance(node, NestedMap):
        return node
    replaced = NestedMap()
    for key, value in node.items():
        if key == old:
            replaced[new] = convert(value)
        else:
            replaced[key] = _replaced(value, old, new, convert)
    return replaced
