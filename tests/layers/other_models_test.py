"""The settings that make a layer one of T5, against Hugging Face's own layers.

model/llama_test.py and hugging_face/logits_test.py compare whole models of Llama and NLLB.

hugging_face/blocks.py computed the numbers. A weight there is transposed: [out, in].

B batch, L length, M model, N heads, D head size, H hidden.
"""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.attention import causal_mask
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.positions import RelativeBias, RotaryPositions
from lingvo_gshard.layers.transformer import Attended, TransformerLayer
from tests.layers import building

M, N, D, H = 12, 3, 4, 20
_FOLDER = pathlib.Path(__file__).parent / "hugging_face"


def _stored(name):
    return dict(np.load(_FOLDER / f"{name}.npz"))


def _layer(norm, positions, **feed_forward):
    p = TransformerLayer.Params().Set(dim=M, norm=norm)
    p.attention.Set(num_heads=N, head_dim=D, positions=positions)
    p.feed_forward = FeedForwardLayer.Params().Set(hidden_dim=H, **feed_forward)
    return p


def _heads_out(weight):
    """From [N * D, M] to [M, N, D], of a projection to heads."""
    return weight.T.reshape(M, N, D)


def _heads_in(weight):
    """From [M, N * D] to [N, D, M], of the projection from heads."""
    return weight.T.reshape(N, D, M)


def _output(params, theta, stored, mask, positions):
    """Returns our layer's output for `x` [B, L, M]."""
    layer = params.Instantiate(building.Unannotated(), "layer")
    given = dict(theta.FlattenItems())
    paths = [path for path, _ in layer.weight_specs.FlattenItems()]
    assert sorted(given) == sorted(paths)
    weights = layer.weight_specs.Pack(given[path] for path in paths)
    x = tf.constant(stored["x"])
    length = x.shape[1]
    attended = Attended(
        tf.broadcast_to(mask, [len(x), length, length]), tf.ones(x.shape[:2]), positions=positions
    )
    y, _ = layer.FProp(weights.Transform(tf.constant), x, attended, Context(Mode.EVAL))
    return y


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_t5(side):
    stored = _stored(f"t5_{side}")
    bias = RelativeBias.Params().Set(num_buckets=8, max_distance=5, looks_ahead=side == "encoder")
    params = _layer(RMSNorm.Params(), bias, activation=Activation.GELU_TANH, gated=True)
    params.attention.scaled = False
    theta = NestedMap(
        self_norm=NestedMap(scale=stored["0.layer_norm.weight"]),
        self_attention=NestedMap(
            wq=_heads_out(stored["0.SelfAttention.q.weight"]),
            wk=_heads_out(stored["0.SelfAttention.k.weight"]),
            wv=_heads_out(stored["0.SelfAttention.v.weight"]),
            wo=_heads_in(stored["0.SelfAttention.o.weight"]),
            positions=NestedMap(table=stored["0.SelfAttention.relative_attention_bias.weight"]),
        ),
        feed_forward_norm=NestedMap(scale=stored["1.layer_norm.weight"]),
        feed_forward=NestedMap(
            wi_gate=stored["1.DenseReluDense.wi_0.weight"].T,
            wi=stored["1.DenseReluDense.wi_1.weight"].T,
            wo=stored["1.DenseReluDense.wo.weight"].T,
        ),
    )
    batch, length, _ = stored["x"].shape
    mask = causal_mask(length) if side == "decoder" else tf.ones([1, length, length])
    positions = tf.tile(tf.range(length)[None], [batch, 1])
    got = _output(params, theta, stored, mask, positions)
    np.testing.assert_allclose(got, stored["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_buckets_of_distances(side):
    stored = _stored(f"t5_{side}")
    p = RelativeBias.Params().Set(num_heads=N, looks_ahead=side == "encoder")
    layer = p.Instantiate(building.Unannotated(), "positions")
    got = layer._buckets(tf.constant(stored["distances"], tf.int32))
    np.testing.assert_array_equal(got, stored["buckets"])


def test_a_head_of_odd_size_cannot_be_rotated():
    p = RotaryPositions.Params().Set(num_heads=N)
    layer = p.Instantiate(building.Unannotated(), "positions")
    with pytest.raises(ValueError, match="^positions: the head size must be even, got 3"):
        layer.Rotated(tf.zeros([1, N, 2, 3]), tf.zeros([1, 2], tf.int32))


@pytest.mark.parametrize(
    "settings", [{"num_buckets": 1}, {"num_buckets": 3, "looks_ahead": True}, {"max_distance": 16}]
)
def test_invalid_buckets_are_refused(settings):
    p = RelativeBias.Params().Set(num_heads=N).Set(**settings)
    with pytest.raises(ValueError, match="^positions: num_buckets must be 2 or more"):
        p.Instantiate(building.Unannotated(), "positions")
