"""Conversion of layers to stacked blocks and back."""

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import stacking
from tests.layers import building


def _layer(i):
    return NestedMap(norm=NestedMap(scale=np.full(3, i)), w=np.full((2, 3), 10 * i))


def _state(num_layers):
    stack = NestedMap(layers=[_layer(i) for i in range(num_layers)], norm=np.ones(3))
    return NestedMap(step=np.int32(7), theta=NestedMap(encoder=stack, softmax=np.zeros(5)))


def test_layers_of_a_block_are_stacked_over_blocks():
    encoder = stacking.stacked(_state(6), 2).theta.encoder
    assert encoder.keys() == {"block", "norm"} and len(encoder.block) == 2
    assert encoder.block[1].w.shape == (3, 2, 3)
    np.testing.assert_array_equal(encoder.block[1].norm.scale[:, 0], [1, 3, 5])


@pytest.mark.parametrize("block_size", [1, 2])
def test_unstacked_inverts_stacked(block_size):
    state = _state(4)
    back = stacking.unstacked(stacking.stacked(state, block_size))
    building.assert_close(back, state, rtol=0, atol=0)


def test_incomplete_blocks_are_refused():
    with pytest.raises(ValueError, match="stacked: 3 layers are not a multiple of 2"):
        stacking.stacked(_state(3), 2)
