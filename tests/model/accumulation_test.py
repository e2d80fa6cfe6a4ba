"""Gradients of microbatches against the whole batch's, by JAX and by the model itself.

B batch, L length, M inputs, V classes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import base_layer, hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.model import placement
from lingvo_gshard.model.accumulation import Accumulation
from lingvo_gshard.plans import run_programs
from lingvo_gshard.plans.request import make_request
from lingvo_gshard.sharding.annotator import Annotator
from tests import exhaustive
from tests.layers import building
from tests.model import small_task, steps_of_task
from tests.spmd import functions
from tests.xla_spmd import compilers

B, L, M, V = 16, 3, 4, 5
_SPECS = NestedMap(
    embedding=base_layer.gaussian((7, M), "VM", fan_in=M),
    softmax=base_layer.gaussian((M, V), "MV", fan_in=M),
)


def _loss(theta, features, labels, context):
    """A mean over tokens, and a mean over rows; each microbatch has the same number of rows."""
    logits = tf.gather(theta.embedding, features.ids) @ theta.softmax
    nll_BL = tf.nn.sparse_softmax_cross_entropy_with_logits(labels.classes, logits)
    num_tokens = tf.reduce_sum(labels.weights)
    nll = tf.reduce_sum(nll_BL * labels.weights) / context.tokens_of_mean(num_tokens)
    aux_loss = tf.reduce_mean(tf.square(tf.reduce_sum(logits, [1, 2])))
    loss = nll + 0.1 * aux_loss
    return loss, NestedMap(loss=loss, nll=nll, aux_loss=aux_loss, num_tokens=num_tokens)


def _jax_loss(theta, batch):
    """The same loss for the whole batch, in JAX."""
    logits = theta["embedding"][batch["ids"]] @ theta["softmax"]
    log_probs = jax.nn.log_softmax(logits)
    nll_BL = -jnp.take_along_axis(log_probs, batch["classes"][..., None], -1)[..., 0]
    nll = jnp.sum(nll_BL * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    return nll + 0.1 * jnp.mean(jnp.square(jnp.sum(logits, [1, 2])))


def _batch(num_real=None):
    """Rows with 0 to L tokens, so that microbatches have different numbers of them."""
    rng = np.random.default_rng(2)
    weights = (np.arange(L) < rng.integers(0, L + 1, (B, 1))).astype("float32")
    if num_real is not None:
        weights[:] = 0.0
        weights.flat[:num_real] = 1.0
    return {
        "ids": rng.integers(0, 7, (B, L)).astype("int32"),
        "classes": rng.integers(0, V, (B, L)).astype("int32"),
        "weights": weights,
    }


def _accumulated(count, num_partitions, batch):
    parts = functions.partitioning(num_partitions)
    annotator = Annotator(parts)
    accumulation = Accumulation(
        _loss, lambda labels: tf.reduce_sum(labels.weights), _SPECS, annotator, count
    )

    def fn(theta, batch):
        context = Context(Mode.TRAIN, tf.constant([1, 2]))
        features = NestedMap(ids=batch.ids)
        labels = NestedMap(classes=batch.classes, weights=batch.weights)
        loss, metrics, gradients = accumulation.gradients(theta, features, labels, context)
        return NestedMap(loss=loss, metrics=metrics, gradients=gradients)

    specs = NestedMap(batch).Transform(lambda x: functions.TensorSpec(x.shape, x.dtype.name, "BL"))
    theta_specs = _SPECS.Transform(lambda w: functions.TensorSpec(w.shape, "float32", w.dims))
    dims = {f"gradients.{path}": spec.dims for path, spec in theta_specs.FlattenItems()}
    executable = building.compile_fn(fn, parts, dims, theta=theta_specs, batch=specs)
    return executable(_theta(), NestedMap(batch)).Transform(np.asarray)


def _theta():
    rng = np.random.default_rng(1)
    return _SPECS.Transform(lambda w: rng.standard_normal(w.shape).astype("float32"))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "num_partitions"), [(1, 1), (4, 2), (2, 8)])
def test_loss_and_gradients_are_jax_s_of_the_whole_batch(count, num_partitions):
    batch = _batch()
    by_microbatch = batch["weights"].reshape(4, -1).sum(1)
    assert len(set(by_microbatch)) > 1

    got = _accumulated(count, num_partitions, batch)
    want, gradients = jax.value_and_grad(_jax_loss)(dict(_theta()), batch)
    np.testing.assert_allclose(got.loss, want, rtol=1e-6)
    building.assert_close(got.gradients, NestedMap(gradients), rtol=1e-5)
    assert got.metrics.num_tokens == batch["weights"].sum()
    np.testing.assert_allclose(got.metrics.nll + 0.1 * got.metrics.aux_loss, want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_real", [0, 1])
def test_fewer_tokens_than_microbatches(num_real):
    batch = _batch(num_real)
    got = _accumulated(4, 1, batch)
    np.testing.assert_allclose(got.loss, _jax_loss(dict(_theta()), batch), rtol=1e-6)


def test_microbatches_that_do_not_divide_the_rows_are_refused():
    expected = (
        "train.gradient_accumulation_steps=3 does not divide a batch of 16 rows into parts for 2 "
        "partitions; choose a divisor of 8"
    )
    with pytest.raises(ValueError, match=expected):
        _accumulated(3, 2, _batch())

    # A run is refused before anything is traced.
    params = small_task.Experiment.params()
    params.train.gradient_accumulation_steps = 3
    with pytest.raises(ValueError, match=r"accumulation_steps=3 does not divide a batch of 8 rows"):
        placement.check_sizes(params, placement.partitioning(params, 2))


# Without random numbers, which differ by microbatch.
_SETTINGS = [
    "optimizer.schedule.multiplier=0.1",
    "task.input_dropout.rate=0.0",
    *(
        f"task.{stack}.{setting}"
        for stack in ("encoder", "decoder")
        for setting in (
            "moe.gating.second_expert=ALL",
            "moe.gating.z_loss_weight=0.1",
            "layer.attention.dropout.rate=0.0",
            "layer.residual_dropout.rate=0.0",
        )
    ),
]
_LOOPS = [f"task.{stack}.layers_as=LOOP" for stack in ("encoder", "decoder")]
_ACCUMULATED = "train.gradient_accumulation_steps={}"
_SUMS = ("all-reduce", "reduce-scatter")
_ZERO = "sharding=BGE:d,mhnv:d"


@functools.cache
def _trained(num_partitions, *settings):
    """The metrics of two steps and the state after them."""
    params = small_task.Experiment.params()
    params.task.encoder.moe.group_size = small_task.T
    params.task.decoder.moe.group_size = small_task.L
    for setting in (*_SETTINGS, *settings):
        hyperparams.apply_setting(params, setting)
    batches = [small_task.random_batch(seed) for seed in range(2)]
    return steps_of_task.training(params, num_partitions, batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "count", "settings"),
    [
        pytest.param(1, 4, (), marks=pytest.mark.exhaustive),
        pytest.param(2, 4, (), marks=pytest.mark.exhaustive),
        pytest.param(4, 2, (), marks=pytest.mark.exhaustive),
        pytest.param(4, 2, (_ZERO,), marks=pytest.mark.exhaustive),
        pytest.param(4, 2, ("sharding=HN:d",), marks=pytest.mark.exhaustive),
        (8, 4, ("mesh=b:2,e:4", "sharding=B:b,G:b+e,E:e")),
        (2, 4, tuple(_LOOPS)),
    ],
)
def test_a_model_trains_on_microbatches_as_on_the_whole_batch(num_partitions, count, settings):
    got = _trained(num_partitions, *settings, _ACCUMULATED.format(count))
    want = _trained(1, *(setting for setting in settings if setting in _LOOPS))
    for ours, theirs in zip(got.metrics, want.metrics, strict=True):
        assert {"router_loss", "max_load", "idle_experts", "overflow"} <= theirs.routing.keys()
        building.assert_close(ours, theirs, rtol=1e-4)
    building.assert_close(got.state.theta, want.state.theta, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_gradients_are_summed_over_devices_once(name):
    compilers.need(name)
    # Groups within a row, so that every device has the same number of them in each microbatch.
    settings = (
        "task.source_vocab_size=512",
        "task.target_vocab_size=256",
        "task.encoder.moe.group_size=64",
        "task.decoder.moe.group_size=48",
    )

    def reduced_bytes(*more):
        request = make_request("toy.MoE8E4L", name, (*settings, *more), None).step_only()
        plan = run_programs.make_plan(request)
        assert plan.step.fits
        ops = [op for op in plan.step.cost.collectives if op.kind in _SUMS]
        return sum(op.bytes for op in ops)

    # A compiler may leave the gradients of a few weights in the loop, but not most of them.
    assert reduced_bytes(_ACCUMULATED.format(4)) < 2 * reduced_bytes()
