"""The stack: which layers have experts, their reports, and the ways to apply them."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.layer_order import layer_order
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from tests.layers import building, small_stack, stacking
from tests.layers.small_stack import attended

_EVAL = Context(Mode.EVAL)


def test_every_other_layer_has_experts():
    kinds = [type(layer.feed_forward) for layer in small_stack.stack().layers]
    assert kinds == [FeedForwardLayer, MoELayer, FeedForwardLayer, MoELayer]

    dense = small_stack.stack(has_experts=False)
    assert [type(layer.feed_forward) for layer in dense.layers] == [FeedForwardLayer] * 4


def test_every_nth_layer_has_experts():
    def kinds(**settings):
        return [type(layer.feed_forward) for layer in small_stack.stack(**settings).layers]

    experts_at_2 = [FeedForwardLayer, FeedForwardLayer, MoELayer, FeedForwardLayer]
    assert kinds(num_layers=4, moe_every=3) == experts_at_2
    assert kinds(num_layers=2, moe_every=1) == [MoELayer, MoELayer]
    assert kinds(num_layers=2, moe_every=3) == [FeedForwardLayer, FeedForwardLayer]

    with pytest.raises(ValueError, match="^stack: moe_every must be 1 or more, got 0"):
        small_stack.stack(moe_every=0)


def test_layers_have_experts_in_any_order():
    def kinds(*moe_layers, num_layers):
        stack = small_stack.stack(num_layers=num_layers, moe_layers=moe_layers)
        return [isinstance(layer.feed_forward, MoELayer) for layer in stack.layers]

    assert kinds(1, 2, num_layers=3) == [False, True, True]
    assert kinds(0, 3, num_layers=4) == [True, False, False, True]
    assert kinds(num_layers=2) == [False, False]

    with pytest.raises(ValueError, match="^stack: moe_layers must be layers from 0 to 3, got "):
        small_stack.stack(moe_layers=(1, 4))


@pytest.mark.parametrize(
    ("kinds", "num_first", "block"),
    [
        ("DEEE", 1, "E"),
        ("DDEDEDE", 1, "DE"),
        ("DEDE", 0, "DE"),
        ("EEE", 0, "E"),
        ("EDDE", 0, "EDDE"),
        ("DDDEEDEE", 2, "DEE"),
    ],
)
def test_a_block_is_the_shortest_part_that_repeats(kinds, num_first, block):
    moe_layers = tuple(i for i, kind in enumerate(kinds) if kind == "E")
    order = layer_order(small_stack.params(num_layers=len(kinds), moe_layers=moe_layers), "stack")
    assert (order.num_first, order.block_size, order.is_whole) == (num_first, len(block), True)
    assert order.num_first + order.num_blocks * order.block_size == len(kinds)


@pytest.mark.parametrize(("has_experts", "routed"), [(True, [1, 3]), (False, [])])
def test_moe_layers_report_routing(has_experts, routed):
    stack = small_stack.stack(has_experts=has_experts)
    x = small_stack.x_BLM()
    y, reports = stack.FProp(building.random_theta(stack), x, attended(), _EVAL)
    assert y.shape == x.shape and len(reports) == 4
    assert [i for i, report in enumerate(reports) if report.routing is not None] == routed


@pytest.mark.parametrize("num_layers", [1, 3])
def test_layers_follow_each_other_up_to_the_final_norm(num_layers):
    """This also holds if the last block lacks a layer with experts."""
    stack = small_stack.stack(num_layers=num_layers)
    theta = building.random_theta(stack)

    want = small_stack.x_BLM()
    for layer, weights in zip(stack.layers, theta.layers, strict=True):
        want, _ = layer.FProp(weights, want, attended(), _EVAL)
    want = stack.norm.FProp(theta.norm, want)

    y, _ = stack.FProp(theta, small_stack.x_BLM(), attended(), _EVAL)
    np.testing.assert_allclose(y, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("remat", "moe_every"), [(Remat.NONE, 1), (Remat.BLOCK, 2), (Remat.ALL_BUT_PRODUCTS, 3)]
)
def test_a_loop_equals_unrolled_layers(remat, moe_every):
    """The values alone: repeat_test.py has gradients, model/layers_as_test.py whole steps."""
    sizes = {"num_layers": 2 * moe_every, "moe_every": moe_every}
    unrolled = small_stack.stack(**sizes)
    loop = small_stack.stack(layers_as=Layers.LOOP, remat=remat, **sizes)
    theta = building.random_theta(unrolled)
    stacks = stacking.stacked(theta, moe_every)
    context = Context(Mode.TRAIN, tf.constant([1, 5]))

    x = small_stack.x_BLM()
    want, want_reports = unrolled.FProp(theta.Transform(tf.constant), x, attended(), context)
    got, reports = loop.FProp(stacks.Transform(tf.constant), x, attended(), context)

    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for report, want_report in zip(reports, want_reports, strict=True):
        np.testing.assert_allclose(report.mean_square, want_report.mean_square, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.EVAL])
def test_a_loop_after_a_dense_layer_equals_unrolled_layers(mode):
    sizes = {"num_layers": 5, "moe_layers": (2, 4)}
    unrolled = small_stack.stack(**sizes)
    loop = small_stack.stack(layers_as=Layers.LOOP, remat=Remat.BLOCK, **sizes)
    assert (len(loop.layers), len(loop.block)) == (1, 2)

    theta = building.random_theta(unrolled)
    rest = stacking.stacked(NestedMap(layers=theta.layers[1:], norm=theta.norm), 2)
    looped = NestedMap(layers=theta.layers[:1], block=rest.block, norm=theta.norm)
    context = Context(mode, tf.constant([1, 5]) if mode is Mode.TRAIN else None)

    x = small_stack.x_BLM()
    want, want_reports = unrolled.FProp(theta.Transform(tf.constant), x, attended(), context)
    got, reports = loop.FProp(looped.Transform(tf.constant), x, attended(), context)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    routed = [report.routing is not None for report in reports]
    assert routed == [False, False, True, False, True]
    for report, want_report in zip(reports, want_reports, strict=True):
        np.testing.assert_allclose(report.mean_square, want_report.mean_square, rtol=1e-4)


def test_a_stack_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="^stack: num_layers must be 1 or more, got 0"):
        small_stack.stack(num_layers=0)


def test_a_loop_refuses_incomplete_blocks():
    message = "^stack: LOOP needs whole blocks of 2 layers, got num_layers 5"
    with pytest.raises(ValueError, match=message):
        small_stack.stack(num_layers=5, layers_as=Layers.LOOP)


def test_a_stack_does_not_know_auto():
    with pytest.raises(ValueError, match="remat=AUTO is replaced only where .* one of NONE, ALL_"):
        small_stack.stack(remat=Remat.AUTO)
