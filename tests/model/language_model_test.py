"""The language model: decoding equals teacher forcing, tied weights, and refused input.

B batch, k beam, T length of prompts, S steps.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import registry
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.norms import RMSNorm
from lingvo_gshard.layers.positions import RelativeBias, RotaryPositions
from lingvo_gshard.model.flops import step_flops
from lingvo_gshard.model.step_products import products_of
from lingvo_gshard.sharding.layout import TensorSpec
from tests import exhaustive
from tests.layers import building
from tests.model import small_language_model as small
from tests.model.small_language_model import VOCAB, B, T

_S = 4
_EOS = 2


def _decode(**settings):
    """The settings of a search for S steps."""
    p = registry.get_params("toy.LmMoE8E4L").decode
    return p.Set(max_target_len=_S, batch_size=B, **settings)


def _of_other_models(**settings):
    """A task with the settings of Llama, except its positions, and with a tied softmax."""
    p = small.task_params(tied_softmax=True, scaled_logits=True, **settings)
    p.embedding.Set(scaled=False, sinusoids=False)
    p.decoder.layer.norm = RMSNorm.Params()
    p.decoder.dense.Set(activation=Activation.SILU, gated=True)
    return p


def _with(positions):
    p = _of_other_models()
    p.decoder.layer.attention.positions = positions
    return p


_TASKS = {
    "sinusoids": small.task_params(),
    "rotary": _with(RotaryPositions.Params()),
    "bias": _with(RelativeBias.Params().Set(num_buckets=4, max_distance=6)),
}


def _theta(task):
    theta = building.random_theta(task)
    if "softmax" in theta:
        theta.softmax[:, _EOS] *= 3  # Sometimes EOS is the likeliest, so lengths differ.
    return theta


def _forced(task, theta, prompts, ids_BS, lengths_B):
    """Log-probabilities [B, S] of each token after its prompt, with teacher forcing."""
    num_prompt = prompts.segment_ids.sum(1)
    length = T + _S
    inputs = np.zeros((B, length), np.int32)
    segments = np.zeros((B, length), np.int32)
    for row in range(B):
        n = num_prompt[row]
        inputs[row, :n] = prompts.ids[row, :n]
        inputs[row, n : n + _S - 1] = ids_BS[row, : _S - 1]
        segments[row, : n + lengths_B[row] - 1] = 1

    positions = np.tile(np.arange(length, dtype=np.int32), (B, 1))
    features = NestedMap(ids=inputs, segment_ids=segments, positions=positions)
    logits, _ = task.FProp(
        theta.Transform(tf.constant), features.Transform(tf.constant), Context(Mode.PREDICT)
    )
    log_probs = tf.nn.log_softmax(logits).numpy()

    found = np.zeros((B, _S))
    for row in range(B):
        for step in range(lengths_B[row]):
            found[row, step] = log_probs[row, num_prompt[row] - 1 + step, ids_BS[row, step]]
    return found


_BEAM = {"beam_size": 3}
_SAMPLES = {"beam_size": 1, "temperature": 0.8, "top_k": 9, "top_p": 0.7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sinusoids", _BEAM),
        ("rotary", _SAMPLES),
        ("bias", _BEAM),
        pytest.param("sinusoids", _SAMPLES, marks=exhaustive.RARE),
        ("rotary", _BEAM),
        pytest.param("bias", _SAMPLES, marks=exhaustive.RARE),
    ],
)
def test_decoding_equals_teacher_forcing(name, settings):
    """Prompts differ in length, and the last row is padding."""
    task = _TASKS[name].Instantiate(building.Unannotated())
    theta = _theta(task)
    prompts = small.prompts(0, pad_last=True)

    @tf.function(jit_compile=True, autograph=False)
    def predict(features):
        return task.Predict(theta.Transform(tf.constant), features, _decode(**settings))

    found = predict(prompts.Transform(tf.constant)).Transform(lambda x: x.numpy())
    assert found.lengths[-1, 0] == 0 and found.lengths[:-1, 0].min() >= 1

    ids = found.ids[:, 0]
    assert ids.shape == (B, _S) and ids.max() < VOCAB
    want = _forced(task, theta, prompts, ids, found.lengths[:, 0])
    np.testing.assert_allclose(found.token_log_probs[:, 0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_sample_depends_on_its_prompt_and_seed_and_not_on_its_batch():
    task = small.task_params().Instantiate(building.Unannotated())
    theta = _theta(task).Transform(tf.constant)
    decode = _decode(beam_size=1, temperature=1.5, num_best=3)

    @tf.function(jit_compile=True, autograph=False)
    def predict(features):
        return task.Predict(theta, features, decode)

    def ids(features):
        return predict(features.Transform(tf.constant)).ids.numpy()

    prompts = small.prompts(0)
    found = ids(prompts)
    assert found.shape == (B, 1, _S)  # Whatever num_best is.
    order = np.roll(np.arange(B), 3)
    np.testing.assert_array_equal(ids(prompts.Transform(lambda x: x[order])), found[order])

    # Rows with the same prompt: different seeds draw different samples.
    same = prompts.Transform(lambda x: np.repeat(x[:1], B, 0))
    same.seeds = prompts.seeds
    drawn = ids(same)
    same.seeds = prompts.seeds + np.array([1, 0], np.int32)
    others = ids(same)
    assert len(np.unique(drawn, axis=0)) > B // 2
    assert (drawn != others).any((1, 2)).sum() > B // 2


def test_a_sample_of_another_seed_is_not_the_same_one_step_later():
    task = small.task_params().Instantiate(building.Unannotated())
    even = task.weight_specs.Transform(lambda spec: tf.zeros(spec.shape))  # All logits are 0.
    prompts = NestedMap(small.prompts(0))
    del prompts["seeds"]

    def ids(seed):
        @tf.function(jit_compile=True, autograph=False)
        def predict(features):
            decode = _decode(beam_size=1, temperature=1.0, seed=seed, min_target_len=_S)
            return task.Predict(even, features, decode)

        return predict(prompts.Transform(tf.constant)).ids.numpy()[:, 0]

    first = ids(0)
    second = ids(1)
    assert (second[:, :-2] == first[:, 1:-1]).mean() < 0.5
    assert (second == first).mean() < 0.5


def test_a_document_does_not_see_the_others_of_its_row():
    task = small.task_params().Instantiate(building.Unannotated())
    theta = _theta(task).Transform(tf.constant)
    batch = small.random_batch(0)
    changed = batch.features.ids.copy()
    is_first = batch.features.segment_ids == 1
    changed[is_first] = 5

    def logits(ids):
        features = NestedMap(batch.features, ids=ids).Transform(tf.constant)
        return task.FProp(theta, features, Context(Mode.PREDICT))[0].numpy()

    is_second = batch.features.segment_ids == 2
    got = logits(changed)
    want = logits(batch.features.ids)
    np.testing.assert_allclose(got[is_second], want[is_second], rtol=1e-5, atol=1e-6)
    assert not np.allclose(got[is_first], want[is_first])


@pytest.mark.slow
def test_a_tied_softmax_is_the_embeddings_table():
    task = _of_other_models().Instantiate(building.Unannotated())
    assert "softmax" not in task.weight_specs
    theta = _theta(task).Transform(tf.constant)
    x = np.random.default_rng(1).normal(size=(2, 3, small.M)).astype(np.float32)
    got = task._logits(theta, tf.constant(x), Context(Mode.EVAL)).numpy()
    want = x @ theta.embedding.table.numpy().T / math.sqrt(small.M)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    # Its product is counted like a product with separate weights.
    batch = small.random_batch(0)
    specs = batch.Transform(lambda x: TensorSpec(x.shape, x.dtype.name, "BL"))
    flops = []
    for is_tied in (False, True):
        params = small.task_params(tied_softmax=is_tied)
        flops.append(step_flops(products_of(params, specs)))
    assert flops[0] == flops[1]


@pytest.mark.slow
def test_the_softmaxs_z_loss_and_cap_equal_numpy():
    """By Lingvo's formulas: z_loss * log(sum exp z)^2 of each token, and cap * tanh(z / cap)."""
    cap, weight = 0.7, 0.3
    batch = small.random_batch(3)
    settings = {"label_smoothing": 0.0, "scaled_logits": True}
    plain = small.task_params(**settings).Instantiate(building.Unannotated())
    task = small.task_params(logit_cap=cap, z_loss_weight=weight, **settings)
    task = task.Instantiate(building.Unannotated())
    theta = building.random_theta(plain).Transform(tf.constant)
    batch = batch.Transform(tf.constant)
    context = Context(Mode.EVAL)

    logits, _ = plain.FProp(theta, batch.features, context)
    wanted = cap * np.tanh(logits.numpy().astype(np.float64) / cap)
    got, _ = task.FProp(theta, batch.features, context)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)

    normalizer = np.logaddexp.reduce(wanted, -1)
    labels = batch.labels.labels.numpy()
    nll = normalizer - np.take_along_axis(wanted, labels[..., None], -1)[..., 0]
    weights = batch.labels.weights.numpy()
    mean = ((nll + weight * normalizer**2) * weights).sum() / weights.sum()
    loss, terms = task.Loss(theta, batch.features, batch.labels, context)
    balance = 0.01 * small.E**2 * terms.aux_loss
    np.testing.assert_allclose(loss - balance, mean, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"z_loss_weight": -1.0}, "z_loss_weight must be 0 or more"),
        ({"logit_cap": 0.0}, "logit_cap"),
    ],
)
def test_losses_and_caps_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^task.{message}"):
        small.task_params(**settings).Instantiate(building.Unannotated())


def test_metrics_of_evaluation():
    task = small.task_params(aux_loss_weight=0.0).Instantiate(building.Unannotated())
    batch = small.random_batch(0).Transform(tf.constant)
    theta = _theta(task).Transform(tf.constant)
    _, metrics = task.Loss(theta, batch.features, batch.labels, Context(Mode.EVAL))
    bits, num_bytes = task.EvalMetrics(metrics)["bits_per_byte"]
    num_tokens = float(metrics.num_tokens)
    assert float(num_bytes) == 3 * num_tokens
    want = float(metrics.nll) * num_tokens / math.log(2)
    assert float(bits) == pytest.approx(want, rel=1e-6)


def test_attention_to_a_source_is_refused():
    task = small.task_params().Instantiate(building.Unannotated())
    with pytest.raises(ValueError, match=r"tell_attention and .* a language model does not have"):
        task.Predict(NestedMap(), small.prompts(0), _decode(tell_attention=True))
