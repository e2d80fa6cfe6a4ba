"""A single layer: its residuals, its report, and its attention."""

import numpy as np

from lingvo_gshard.layers.context import Context, Mode
from tests.layers import building, small_stack
from tests.layers.small_stack import attended

_EVAL = Context(Mode.EVAL)


def _layer(**settings):
    [layer] = small_stack.stack(num_layers=1, **settings).layers
    return layer


def test_each_sublayer_adds_its_output_to_the_input_of_its_norm():
    layer = _layer(has_source=True)
    theta = building.random_theta(layer)
    x = small_stack.x_BLM()
    encoded = small_stack.encoded_BTM()
    given = attended(encoded)

    want = x
    attention = layer.self_attention
    h = layer.self_norm.FProp(theta.self_norm, want)
    memory = attention.Project(theta.self_attention, h, _EVAL)
    want += attention.FProp(theta.self_attention, h, memory, given.mask, _EVAL)

    attention = layer.source_attention
    h = layer.source_norm.FProp(theta.source_norm, want)
    memory = attention.Project(theta.source_attention, encoded, _EVAL)
    want += attention.FProp(theta.source_attention, h, memory, given.source_mask, _EVAL)

    h = layer.feed_forward_norm.FProp(theta.feed_forward_norm, want)
    want += layer.feed_forward.FProp(theta.feed_forward, h, _EVAL)

    y, _ = layer.FProp(theta, x, given, _EVAL)
    np.testing.assert_allclose(y, want, rtol=1e-6)


def test_the_report_holds_the_mean_square_of_the_output():
    layer = _layer()
    y, report = layer.FProp(building.random_theta(layer), small_stack.x_BLM(), attended(), _EVAL)
    np.testing.assert_allclose(report.mean_square, np.mean(np.square(y)), rtol=1e-6)
    assert report.routing is None


def test_only_decoder_layers_attend_to_source():
    encoder = _layer(has_source=False).weight_specs
    decoder = _layer(has_source=True).weight_specs
    assert decoder.keys() - encoder.keys() >= {"source_attention", "source_norm"}
    assert not encoder.keys() - decoder.keys()
