"""Attention against a loop in numpy, and the effect of masks.

B batch, L queries, T keys, M model, N heads, D head size.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers import attention
from lingvo_gshard.layers.attention import MultiHeadAttention
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.norms import HeadRMSNorm, LayerNorm, Over, RMSNorm
from lingvo_gshard.layers.positions import RotaryPositions
from tests.layers import building

B, L, T, M, N, D = 2, 3, 4, 10, 5, 6


@pytest.fixture(scope="module")
def layer():
    p = MultiHeadAttention.Params().Set(dim=M, num_heads=N, head_dim=D)
    return p.Instantiate(building.Unannotated(), "attention")


def _attend(layer, theta, x_BLM, source_BTM, mask_BLT):
    memory = layer.Project(theta, tf.constant(source_BTM), Context(Mode.EVAL))
    mask = tf.constant(mask_BLT, tf.float32)
    return layer.FProp(theta, tf.constant(x_BLM), memory, mask, Context(Mode.EVAL)).numpy()


def _literal(theta, x_BLM, source_BTM, mask_BLT):
    out = np.zeros(x_BLM.shape)
    for b, i, n in np.ndindex(len(x_BLM), x_BLM.shape[1], N):
        query = x_BLM[b, i] @ theta.wq[:, n]
        seen = [t for t in range(source_BTM.shape[1]) if mask_BLT[b, i, t]]
        if not seen:
            continue
        logits = np.array([query @ (source_BTM[b, t] @ theta.wk[:, n]) for t in seen]) / D**0.5
        weights = np.exp(logits - logits.max())
        values = np.array([source_BTM[b, t] @ theta.wv[:, n] for t in seen])
        out[b, i] += (weights / weights.sum()) @ values @ theta.wo[n]
    return out


def _normalized(x, scale, axes):
    """The root mean square norm of x, in NumPy."""
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + 1e-6) * scale


def _literal_with(theta, x, source, mask, *, group=1, norm_axes=None, cap=None):
    """As `_literal`, of all queries and keys at once, with the settings of later models."""
    queries = np.einsum("BLM,MND->BLND", x, theta.wq)
    keys = np.einsum("BTM,MND->BTND", source, theta.wk)
    if norm_axes is not None:
        queries = _normalized(queries, theta.query_norm.scale, norm_axes)
        keys = _normalized(keys, theta.key_norm.scale, norm_axes)
    keys = np.repeat(keys, group, axis=2)
    values = np.repeat(np.einsum("BTM,MND->BTND", source, theta.wv), group, axis=2)

    logits = np.einsum("BLND,BTND->BNLT", queries, keys) / D**0.5
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    logits = np.where(mask[:, None] > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("BNLT,BTND,NDM->BLM", weights, values, theta.wo)


_HEAD = HeadRMSNorm.Params()
_ALL_HEADS = HeadRMSNorm.Params().Set(over=Over.ALL_HEADS)


@pytest.mark.parametrize(
    ("settings", "literal"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, {"group": 3}),
        ({"num_heads": 4, "num_kv_heads": 1}, {"group": 4}),
        ({"num_heads": 4, "num_kv_heads": 4}, {}),
        ({"head_norm": _HEAD}, {"norm_axes": (-1,)}),
        ({"head_norm": _ALL_HEADS}, {"norm_axes": (-2, -1)}),
        (
            {"num_heads": 4, "num_kv_heads": 2, "head_norm": _ALL_HEADS},
            {"group": 2, "norm_axes": (-2, -1)},
        ),
        ({"logit_cap": 0.5}, {"cap": 0.5}),
    ],
)
def test_settings_of_later_models_equal_numpy(settings, literal):
    p = MultiHeadAttention.Params().Set(dim=M, num_heads=N, head_dim=D).Set(**settings)
    layer = p.Instantiate(building.Unannotated(), "attention")
    theta, inputs = building.random_theta(layer), _inputs()
    got = _attend(layer, theta, *inputs)
    np.testing.assert_allclose(got, _literal_with(theta, *inputs, **literal), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads must be a divisor of num_heads 5, got 2"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a divisor of num_heads 5, got 0"),
        ({"logit_cap": 0.0}, "logit_cap must be above 0 or None, got 0.0"),
        (
            {"positions": RotaryPositions.Params().Set(max_timescale=0.0)},
            "positions: max_timescale must be above 0, got 0.0",
        ),
        (
            {"head_norm": HeadRMSNorm.Params().Set(epsilon=0.0)},
            "query_norm: epsilon must be above 0, got 0.0",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    p = MultiHeadAttention.Params().Set(dim=M, num_heads=N, head_dim=D, **settings)
    with pytest.raises(ValueError, match=rf"^attention[.:] ?{message}"):
        p.Instantiate(building.Unannotated(), "attention")


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_an_epsilon_that_does_not_keep_the_divisor_above_0_is_refused(norm):
    with pytest.raises(ValueError, match="^norm: epsilon must be above 0, got -1e-06"):
        norm.Params().Set(dim=M, epsilon=-1e-6).Instantiate(building.Unannotated(), "norm")


def _inputs(seed=4):
    rng = np.random.default_rng(seed)
    x, source = (rng.standard_normal((B, size, M)).astype("float32") for size in (L, T))
    mask = (rng.random((B, L, T)) < 0.6).astype("float32")
    mask[..., 1] = 1
    return x, source, mask


def test_equals_literal_loop(layer):
    theta, inputs = building.random_theta(layer), _inputs()
    got, want = _attend(layer, theta, *inputs), _literal(theta, *inputs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_fully_masked_query_gets_mean_of_values(layer):
    theta, (x, source, mask) = building.random_theta(layer), _inputs()
    mask[1, 2] = 0
    got = _attend(layer, theta, x, source, mask)[1, 2]
    values_TND = np.einsum("TM,MND->TND", source[1], theta.wv)
    want = np.einsum("ND,NDM->M", values_TND.mean(0), theta.wo)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_packed_segments_do_not_attend_to_each_other(layer):
    theta = building.random_theta(layer)
    x = np.random.default_rng(5).standard_normal((1, 7, M)).astype("float32")
    segments = tf.constant([[1, 1, 1, 2, 2, 0, 0]])
    mask = attention.segment_mask(segments, segments) * attention.causal_mask(7)
    packed = _attend(layer, theta, x, x, mask.numpy())
    for start, stop in ((0, 3), (3, 5)):
        alone = x[:, start:stop]
        causal = np.tril(np.ones((1, stop - start, stop - start)))
        want = _attend(layer, theta, alone, alone, causal)
        np.testing.assert_allclose(packed[:, start:stop], want, rtol=1e-4, atol=1e-5)


def test_masks():
    segments, source = tf.constant([[1, 2, 0]]), tf.constant([[1, 1, 2, 0]])
    want = [[[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]
    np.testing.assert_array_equal(attention.segment_mask(segments, source), want)
    np.testing.assert_array_equal(attention.causal_mask(3), [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]])


def test_dropout_of_probabilities_is_unbiased():
    p = MultiHeadAttention.Params().Set(dim=M, num_heads=N, head_dim=D, **{"dropout.rate": 0.5})
    layer = p.Instantiate(building.Unannotated(), "attention")
    theta, (x, source, mask) = building.random_theta(layer), _inputs()

    @tf.function(jit_compile=True, autograph=False)
    def train(seed):
        context = Context(Mode.TRAIN, seed)
        memory = layer.Project(theta, tf.constant(source), context)
        return layer.FProp(theta, tf.constant(x), memory, tf.constant(mask), context)

    draws = np.stack([train(tf.constant([1, step])).numpy() for step in range(400)])
    assert np.ptp(draws, axis=0).min() > 0
    want = _attend(layer, theta, x, source, mask)
    deviation = draws.std(0) / 400**0.5
    assert (np.abs(draws.mean(0) - want) < 5 * deviation).all()
