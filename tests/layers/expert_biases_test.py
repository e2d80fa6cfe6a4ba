"""Experts with biases, against a loop over tokens and experts; partitioned as unpartitioned.

hugging_face/logits_test.py tests that they are NLLB-MoE's.

B batch, L length, M model, H hidden, E experts.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating import CapacityBy, SecondExpert
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests import exhaustive
from tests.layers import building
from tests.spmd import functions

B, L, M, H, E = 8, 4, 6, 10, 8
_SPEC = TensorSpec((B, L, M), "float32", "BLM")


def _params(gated=False, **settings):
    p = MoELayer.Params().Set(dim=M, hidden_dim=H, num_experts=E, group_size=L, gated=gated)
    p.train_capacity.by = CapacityBy.TOKENS
    return p.Set(biases=True, **settings)


def _x_BLM():
    return np.random.default_rng(5).standard_normal((B, L, M)).astype("float32")


def _by_loop(theta, x, gated=False, choices=(0, 1)):
    """Returns [B, L, M]: each token through its likeliest experts, weighted by their gates."""
    logits = x @ theta.wg
    gates = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    y = np.zeros_like(x)
    for b, i in np.ndindex(B, L):
        both = np.argsort(-gates[b, i])[:2]
        for e in both[list(choices)]:
            hidden = x[b, i] @ theta.wi[e] + theta.wi_bias[e, 0]
            if gated:
                hidden *= np.maximum(x[b, i] @ theta.wi_gate[e] + theta.wi_gate_bias[e, 0], 0.0)
            else:
                hidden = np.maximum(hidden, 0.0)
            output = hidden @ theta.wo[e] + theta.wo_bias[e, 0]
            y[b, i] += gates[b, i, e] / gates[b, i, both].sum() * output
    return y


@pytest.mark.parametrize("dispatch", Dispatch)
@pytest.mark.parametrize(("mode", "gated"), [(Mode.TRAIN, False), (Mode.EVAL, True)])
def test_equals_a_loop_over_experts(dispatch, mode, gated):
    params = _params(gated, dispatch=dispatch)
    params.gating.second_expert = SecondExpert.ALL
    layer = params.Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer)
    seed = tf.constant([1, 2]) if mode is Mode.TRAIN else None
    x_BLM = _x_BLM()
    got, _ = layer.FProp(
        theta.Transform(tf.constant), tf.constant(x_BLM), tf.ones([B, L]), Context(mode, seed)
    )
    np.testing.assert_allclose(got, _by_loop(theta, x_BLM, gated), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dispatch", Dispatch)
def test_output_dropout_masks_whole_outputs_of_experts(dispatch):
    """Each token has the outputs of both of its experts, of one or of neither, scaled up."""
    rate = 0.4
    params = _params(dispatch=dispatch)
    params.gating.second_expert = SecondExpert.ALL
    params.output_dropout.rate = rate
    layer = params.Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer)
    x_BLM = _x_BLM()

    def fprop(mode, seed):
        tensors = (theta.Transform(tf.constant), tf.constant(x_BLM), tf.ones([B, L]))
        y_BLM, routing = layer.FProp(*tensors, Context(mode, seed))
        return y_BLM.numpy(), float(routing.aux_loss)

    whole, aux_loss = fprop(Mode.EVAL, None)
    np.testing.assert_allclose(whole, _by_loop(theta, x_BLM), rtol=1e-4, atol=1e-4)
    masked, aux_loss_masked = fprop(Mode.TRAIN, tf.constant([1, 2]))
    np.testing.assert_allclose(aux_loss_masked, aux_loss, rtol=1e-6)

    first = _by_loop(theta, x_BLM, choices=[0])
    second = whole - first
    num_kept = np.zeros(3, int)
    for b, i in np.ndindex(B, L):
        candidates = [0.0 * first[b, i], first[b, i], second[b, i], whole[b, i]]
        distances = [np.abs(masked[b, i] * (1 - rate) - y).max() for y in candidates]
        assert min(distances) < 1e-4
        num_kept[[0, 1, 1, 2][int(np.argmin(distances))]] += 1
    # Of 32 tokens, 0.16, 0.48 and 0.36 of them on average.
    assert (num_kept > 0).all() and 25 <= num_kept @ [0, 1, 2] <= 51


def _trained(dispatch, partitioning=None):
    """Returns the output and the gradients in TRAIN mode, with padding, drops and dropout.

    Without a partitioning they are computed eagerly.
    """
    params = MoELayer.Params().Set(
        dim=M, hidden_dim=H, num_experts=E, group_size=L, biases=True, dispatch=dispatch
    )
    params.output_dropout.rate = 0.3
    annotator = Annotator(partitioning) if partitioning else building.Unannotated()
    layer = params.Instantiate(annotator, "moe")

    def fn(theta, batch, seed):
        leaves = [*theta.Flatten(), batch.x]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y, _ = layer.FProp(theta, batch.x, batch.valid, Context(Mode.TRAIN, seed.seed))
            loss = tf.reduce_sum(y * batch.x)
        *d_theta, d_x = tape.gradient(loss, leaves, unconnected_gradients="zero")
        return NestedMap(y=y, d_theta=theta.Pack(d_theta), d_x=d_x)

    valid = (np.arange(L) < np.array([4, 3, 4, 1, 4, 2, 4, 4])[:, None]).astype("float32")
    batch = NestedMap(x=_x_BLM(), valid=valid)
    args = {
        "theta": building.random_theta(layer),
        "batch": batch,
        "seed": NestedMap(seed=np.array([1, 5], np.int32)),
    }
    if partitioning is None:
        return building.run_eagerly(fn, **args)

    specs = building.theta_specs(layer)
    executable = building.compile_fn(
        fn,
        partitioning,
        building.dims_of(d_theta=specs) | {"y": "BLM", "d_x": "BLM"},
        theta=specs,
        batch=NestedMap(x=_SPEC, valid=TensorSpec((B, L), "float32", "BL")),
        seed=NestedMap(seed=TensorSpec((2,), "int32", "_")),
    )
    return executable(*args.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatch", "num_partitions"),
    [
        (Dispatch.EINSUM, 4),
        *[
            pytest.param(dispatch, count, marks=marks)
            for dispatch in Dispatch
            for count, marks in ((2, exhaustive.RARE), (8, pytest.mark.slow))
        ],
    ],
)
def test_partitioned_training_equals_unpartitioned(dispatch, num_partitions):
    got = _trained(dispatch, functions.partitioning(num_partitions))
    building.assert_close(got, _trained(dispatch))
    assert np.abs(got.d_theta.wi_bias).max() > 0.1 and np.abs(got.d_theta.wo_bias).max() > 0.1
