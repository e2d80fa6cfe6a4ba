"""Gradient norms by layer, of unrolled and of stacked layers."""

import numpy as np
import pytest

from lingvo_gshard.core.base_layer import constant, gaussian
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.gradient_norms import gradient_norms
from tests.layers import stacking

_M = 3
_H = 5
_LAYERS = 4


def _weights(make):
    layers = [
        NestedMap(ff=NestedMap(w=make((_M, _H))), b=make((_M,)), dropout=NestedMap())
        for _ in range(_LAYERS)
    ]
    return NestedMap(
        encoder=NestedMap(layers=layers, norm=NestedMap(scale=make((_M,)))),
        source_dropout=NestedMap(),
        softmax=make((_M, _H)),
    )


def _spec(shape):
    dims = "MH"[: len(shape)]
    return constant(shape, dims, 1.0) if len(shape) == 1 else gaussian(shape, dims, fan_in=1)


def _gradients():
    rng = np.random.default_rng(5)
    return _weights(lambda shape: rng.normal(size=shape).astype("float32"))


def _stacked_specs():
    specs = _weights(_spec)
    block = [layer.Transform(lambda w: w.stacked(2)) for layer in specs.encoder.layers[:2]]
    return NestedMap(specs, encoder=NestedMap(block=block, norm=specs.encoder.norm))


@pytest.mark.parametrize("loop", [False, True])
def test_norm_of_all_gradients_of_each_layer(loop):
    gradients = _gradients()
    if loop:
        norms = gradient_norms(stacking.stacked(gradients, 2), _stacked_specs())
    else:
        norms = gradient_norms(gradients, _weights(_spec))

    want = {
        f"encoder_{i}": np.sqrt((layer.ff.w**2).sum() + (layer.b**2).sum())
        for i, layer in enumerate(gradients.encoder.layers)
    }
    want["encoder_norm"] = np.linalg.norm(gradients.encoder.norm.scale)
    want["softmax"] = np.linalg.norm(gradients.softmax)

    assert norms.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(norms[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradient_shows_only_in_its_layer(bad):
    gradients = _gradients()
    gradients.encoder.layers[2].b[1] = bad
    norms = gradient_norms(gradients, _weights(_spec))
    assert [name for name, norm in norms.items() if not np.isfinite(norm)] == ["encoder_2"]
