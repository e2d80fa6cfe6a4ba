"""The stack: which layers have experts, their reports, and the ways to apply them."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.repeat import Layers, Remat
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


@pytest.mark.parametrize(("has_experts", "routed"), [(True, [1, 3]), (False, [])])
def test_moe_layers_report_routing(has_experts, routed):
    stack = small_stack.stack(has_experts=has_experts)
    x = small_stack.x_BLM()
    y, reports = stack.FProp(building.random_theta(stack), x, attended(), _EVAL)
    assert y.shape == x.shape and len(reports) == 4
    assert [i for i, report in enumerate(reports) if report.routing is not None] == routed


@pytest.mark.parametrize("num_layers", [1, 3])
def test_layers_follow_each_other_up_to_the_final_norm(num_layers):
    """Also where the last block has no layer with experts."""
    stack = small_stack.stack(num_layers=num_layers)
    theta = building.random_theta(stack)

    want = small_stack.x_BLM()
    for layer, weights in zip(stack.layers, theta.layers, strict=True):
        want, _ = layer.FProp(weights, want, attended(), _EVAL)
    want = stack.norm.FProp(theta.norm, want)

    y, _ = stack.FProp(theta, small_stack.x_BLM(), attended(), _EVAL)
    np.testing.assert_allclose(y, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("remat", "moe_every"),
    [*[(remat, 2) for remat in Remat], (Remat.NONE, 1), (Remat.ALL_BUT_PRODUCTS, 3)],
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
        np.testing.assert_allclose(report.rms, want_report.rms, rtol=1e-4)


def test_a_stack_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="^stack: num_layers must be 1 or more, got 0"):
        small_stack.stack(num_layers=0)


def test_a_loop_refuses_incomplete_blocks():
    message = "^stack: LOOP needs whole blocks of 2 layers, got num_layers 5"
    with pytest.raises(ValueError, match=message):
        small_stack.stack(num_layers=5, layers_as=Layers.LOOP)
