"""The parts of experts without a capacity; letters as in ragged_experts.py.

That they equal Algorithm 2 as a whole is tested in expert_path_test.py.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import expert_tiles, ragged_experts, slices
from lingvo_gshard.layers.activations import Activation, hidden_units
from lingvo_gshard.layers.numerics import PLAIN
from lingvo_gshard.layers.routing import Choice, Gates
from lingvo_gshard.layers.weight import Weight
from tests.layers import building

M, H = 5, 7


def test_expert_indices_are_exact_in_bfloat16():
    expert_GS, kept_GS = tf.constant([[0, 255, 257, 2047]]), tf.constant([[1.0, 1.0, 0.0, 1.0]])
    first = Choice(None, expert_GS, tf.fill([1, 4], 0.75), None, None, kept_GS)
    second = Choice(None, 2047 - expert_GS, tf.fill([1, 4], 0.25), None, None, kept_GS)
    choices = ragged_experts._encode_choices(Gates((first, second), None), 2048, tf.bfloat16)
    expert_WYJ, gate_WYJ = ragged_experts._decode_choices(choices[None])
    assert expert_WYJ.numpy().tolist() == [[[0, 2047, 255, 1792, 2048, 2048, 2047, 0]]]
    assert gate_WYJ.numpy().tolist() == [[[0.75, 0.25] * 4]]


def test_idle_experts_cost_nothing(monkeypatch):
    """One of four experts has five assignments, so two tiles of 4; another has two."""
    weights_read = []
    reads = []

    def recorded_element(x, index):
        weights_read.append((x.shape[:2], [int(i) for i in index]))
        return slices.read_element(x, index)

    def recorded(x, start, size):
        reads.append((len(x.shape), size))
        return slices.read_at(x, start, size)

    monkeypatch.setattr(expert_tiles, "read_element", recorded_element)
    monkeypatch.setattr(expert_tiles, "read_at", recorded)
    monkeypatch.setattr(ragged_experts, "tile_size", lambda *_: 4)
    none = 4
    expert_WYJ = tf.constant([[[1, 3, 1, none, 1, 3, 1, 1, none, none]]])
    x_WYIM, w_EMH = tf.ones([1, 1, 5, M]), tf.ones([4, M, H])
    w_EHM = tf.transpose(w_EMH, [0, 2, 1])
    theta = NestedMap(wi=Weight(w_EMH), wo=Weight(w_EHM))
    relu_units = functools.partial(hidden_units, Activation.RELU, False)
    experts = expert_tiles.Experts(theta, relu_units, H, tf.identity, PLAIN)
    y_WYJM = ragged_experts._expert_outputs(x_WYIM, expert_WYJ, 2, experts, building.Unannotated())
    assert weights_read == [([1, 4], [0, 1])] * 2 + [([1, 4], [0, 3])] * 2  # Two experts' weights,
    assert reads.count((1, 4)) == 2 + 1  # and their tiles.
    np.testing.assert_array_equal(y_WYJM[..., 0] > 0, expert_WYJ < none)


@pytest.mark.parametrize(
    ("num_assignments", "num_experts", "want"),
    [(2, 8, 1), (16, 8, 8), (256, 8, 8), (512, 8, 16), (8192, 8, 128)],
)
def test_tile_is_a_quarter_of_an_even_share_within_bounds(num_assignments, num_experts, want):
    assert ragged_experts.tile_size(num_assignments // 2, 2, num_experts) == want
