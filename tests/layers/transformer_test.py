"""The stack: which layers have experts, residuals, reports and decoding."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers import attention
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.layers.transformer import Attended, TransformerStack
from tests.layers import building, stacking

B, L, T, M = 2, 4, 6, 8


def _stack(num_layers=4, has_source=False, sparse=True, **settings):
    p = TransformerStack.Params().Set(dim=M, num_layers=num_layers, **settings)
    p.layer.Set(has_source=has_source)
    p.layer.attention.Set(num_heads=2, head_dim=3)
    p.dense.hidden_dim = 10
    if sparse:
        p.moe.Set(hidden_dim=5, num_experts=3, group_size=L)
    else:
        p.moe = None
    return p.Instantiate(building.Unannotated(), "stack")


def _inputs():
    rng = np.random.default_rng(1)
    x, encoded = (tf.constant(rng.standard_normal((B, n, M)), tf.float32) for n in (L, T))
    return x, tf.tile(attention.causal_mask(L), [B, 1, 1]), tf.ones([B, L]), encoded


def test_every_other_layer_has_experts():
    kinds = [type(layer.feed_forward) for layer in _stack().layers]
    assert kinds == [FeedForwardLayer, MoELayer, FeedForwardLayer, MoELayer]
    dense = [type(layer.feed_forward) for layer in _stack(sparse=False).layers]
    assert dense == [FeedForwardLayer] * 4


@pytest.mark.parametrize(("sparse", "routed"), [(True, [1, 3]), (False, [])])
def test_moe_layers_report_routing(sparse, routed):
    stack, (x, mask, valid, _) = _stack(sparse=sparse), _inputs()
    theta = building.random_theta(stack)
    y, reports = stack.FProp(theta, x, Attended(mask, valid), Context(Mode.EVAL))
    assert y.shape == x.shape and len(reports) == 4
    assert [i for i, report in enumerate(reports) if report.routing is not None] == routed


def test_report_holds_root_mean_square_of_layer_output():
    stack, (x, mask, valid, _) = _stack(num_layers=1), _inputs()
    theta = building.random_theta(stack)
    y, [report] = stack.FProp(theta, x, Attended(mask, valid), Context(Mode.EVAL))
    output = stack.layers[0].FProp(theta.layers[0], x, Attended(mask, valid), Context(Mode.EVAL))[0]
    np.testing.assert_allclose(report.rms, np.sqrt(np.mean(np.square(output))), rtol=1e-6)
    np.testing.assert_allclose(y, stack.norm.FProp(theta.norm, output), rtol=1e-6)


def test_layers_with_zero_output_weights_leave_normalized_input():
    stack, (x, mask, valid, encoded) = _stack(has_source=True), _inputs()
    theta = building.random_theta(stack)
    for layer in theta.layers:
        for block in (layer.self_attention, layer.source_attention, layer.feed_forward):
            block.wo[:] = 0
    attended = Attended(mask, valid, tf.ones([B, L, T]), encoded)
    y, _ = stack.FProp(theta, x, attended, Context(Mode.EVAL))
    np.testing.assert_allclose(y, stack.norm.FProp(theta.norm, x), rtol=1e-5)


def test_later_positions_do_not_change_earlier_ones():
    stack, (x, mask, valid, encoded) = _stack(has_source=True), _inputs()
    theta, attended = (
        building.random_theta(stack),
        Attended(mask, valid, tf.ones([B, L, T]), encoded),
    )
    other = tf.concat([x[:, :-1], x[:, -1:, ::-1]], 1)
    a, b = (stack.FProp(theta, z, attended, Context(Mode.EVAL))[0] for z in (x, other))
    np.testing.assert_allclose(a[:, :-1], b[:, :-1], rtol=1e-5, atol=1e-6)
    assert np.abs(a[:, -1] - b[:, -1]).max() > 0.1


def test_only_decoder_layers_attend_to_source():
    encoder, decoder = (_stack(has_source=s).weight_specs.layers[0] for s in (False, True))
    assert decoder.keys() - encoder.keys() >= {"source_attention", "source_norm"}
    assert not encoder.keys() - decoder.keys()


@pytest.mark.parametrize("remat", Remat)
def test_a_loop_equals_unrolled_layers(remat):
    """The values alone: repeat_test.py has gradients, model/layers_as_test.py whole steps."""
    unrolled, loop = _stack(), _stack(layers_as=Layers.LOOP, remat=remat)
    theta, (x, mask, valid, _) = building.random_theta(unrolled), _inputs()
    context = Context(Mode.TRAIN, tf.constant([1, 5]))
    want = unrolled.FProp(theta.Transform(tf.constant), x, Attended(mask, valid), context)
    stacks = stacking.stacked(theta, 2).Transform(tf.constant)
    got = loop.FProp(stacks, x, Attended(mask, valid), context)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a.rms, b.rms, rtol=1e-4)


def test_decoding_with_stacked_weights_equals_unrolled():
    k, cache_len = 2, 6
    unrolled, loop = (_stack(has_source=True, layers_as=way) for way in Layers)
    theta, (x, _, _, encoded) = building.random_theta(unrolled), _inputs()
    own, stacks = (t.Transform(tf.constant) for t in (theta, stacking.stacked(theta, 2)))

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        attended = Attended(tf.ones([B, k, cache_len]), tf.ones([B, k]), tf.ones([B, k, T]))
        rest = (attended, tf.constant(1), Context(Mode.PREDICT))
        found = []
        for stack, weights in ((unrolled, own), (loop, stacks)):
            cache = stack.InitCache(weights, encoded, cache_len, Context(Mode.PREDICT))
            y, cache, attention = stack.ExtendStep(weights, x, cache, *rest)
            found.append([y, attention, *cache.Flatten()])
        return found

    for a, b in zip(*step(x[:, :k]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
