"""The settings that make a layer of experts Mixtral's, DeepSeek-V3's or Switch's, and gradients.

hugging_face/experts.py computed the numbers, by loops over the experts. A weight there is
transposed: [out, in].

B batch, L length, M model, H hidden, E experts.
"""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.activations import Activation
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating import CapacityBy
from lingvo_gshard.layers.gating_layers import Scores, TopKGating
from lingvo_gshard.layers.moe import MoELayer
from tests.layers import building

B, L, M, H, E = 2, 9, 6, 10, 5
_FOLDER = pathlib.Path(__file__).parent / "hugging_face"


def _stored(name):
    return dict(np.load(_FOLDER / f"{name}.npz"))


def _params(**gating):
    p = MoELayer.Params().Set(dim=M, hidden_dim=H, num_experts=E, group_size=L)
    return p.Set(gating=TopKGating.Params().Set(**gating))


def _by_expert(stored, path):
    """Returns the experts' weights of a path with {} for their index, [E, in, out]."""
    return np.stack([stored[path.format(e)].T for e in range(E)])


def _trained(params, theta, stored):
    """Returns y, the routing, and the gradients of sum(y * d_y) by theta and x."""
    layer = params.Instantiate(building.Unannotated(), "moe")
    assert [p for p, _ in theta.FlattenItems()] == [p for p, _ in layer.weight_specs.FlattenItems()]
    weights = layer.weight_specs.Pack(theta.Flatten()).Transform(tf.constant)
    x_BLM = tf.constant(stored["x"])
    context = Context(Mode.TRAIN, tf.constant([1, 2]))

    leaves = [*weights.Flatten(), x_BLM]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        y_BLM, routing = layer.FProp(weights, x_BLM, tf.ones([B, L]), context)
        loss = tf.reduce_sum(y_BLM * stored["d_y"])
    *d_theta, d_x = tape.gradient(loss, leaves, unconnected_gradients="zero")
    return y_BLM, routing, NestedMap(theta=theta.Pack(d_theta), x=d_x)


def _assert_gradients(got, stored, theta):
    """Compares gradients; theta has the names of the stored ones as theta_of made it."""
    np.testing.assert_allclose(got.x, stored["d.x"], rtol=1e-5, atol=1e-5)
    for (path, value), (_, want) in zip(
        got.theta.FlattenItems(), theta.FlattenItems(), strict=True
    ):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5, err_msg=path)
        assert np.abs(want).max() > 0.1 or path == "gate.bias", path


def _mixtral_theta(stored, prefix=""):
    return NestedMap(
        wg=stored[f"{prefix}gate.weight"].T,
        wi_gate=_by_expert(stored, prefix + "experts.{}.w1.weight"),
        wi=_by_expert(stored, prefix + "experts.{}.w3.weight"),
        wo=_by_expert(stored, prefix + "experts.{}.w2.weight"),
    )


@pytest.mark.parametrize("dispatch", Dispatch)
def test_mixtral(dispatch):
    stored = _stored("mixtral")
    params = _params(k=3).Set(activation=Activation.SILU, gated=True, dispatch=dispatch)
    params.train_capacity.by = CapacityBy.TOKENS
    y, routing, gradients = _trained(params, _mixtral_theta(stored), stored)
    np.testing.assert_allclose(y, stored["y"], rtol=1e-5, atol=1e-5)
    _assert_gradients(gradients, stored, _mixtral_theta(stored, "d."))
    assert routing.dropped_choices == 0 and routing.overflow == 0


def _deepseek_theta(stored, prefix=""):
    return NestedMap(
        gate=NestedMap(bias=stored["bias"]),
        wg=stored[f"{prefix}gate.weight"].T,
        wi_gate=_by_expert(stored, prefix + "experts.{}.gate_proj.weight"),
        wi=_by_expert(stored, prefix + "experts.{}.up_proj.weight"),
        wo=_by_expert(stored, prefix + "experts.{}.down_proj.weight"),
        shared=NestedMap(
            wi_gate=stored[f"{prefix}shared_experts.gate_proj.weight"].T,
            wi=stored[f"{prefix}shared_experts.up_proj.weight"].T,
            wo=stored[f"{prefix}shared_experts.down_proj.weight"].T,
        ),
    )


@pytest.mark.parametrize("dispatch", Dispatch)
def test_deepseek_v3(dispatch):
    stored = _stored("deepseek_v3")
    params = _params(k=3, scores=Scores.SIGMOID, bias_rate=0.001, scale=2.5)
    params.Set(activation=Activation.SILU, gated=True, num_shared=2, dispatch=dispatch)
    params.train_capacity.by = CapacityBy.TOKENS
    theta = _deepseek_theta(stored)
    y, _, gradients = _trained(params, theta, stored)
    np.testing.assert_allclose(y, stored["y"], rtol=1e-5, atol=1e-5)

    # The bias only changes the choice of experts, so its gradient is 0.
    want = _deepseek_theta(stored, "d.")
    want.gate.bias = np.zeros(E)
    _assert_gradients(gradients, stored, want)
    theta.gate.bias = np.zeros(E, "float32")
    assert np.abs(_trained(params, theta, stored)[0] - stored["y"]).max() > 0.1


def _switch_theta(stored, prefix=""):
    return NestedMap(
        wg=stored[f"{prefix}router.classifier.weight"].T,
        wi=_by_expert(stored, prefix + "experts.expert_{}.wi.weight"),
        wo=_by_expert(stored, prefix + "experts.expert_{}.wo.weight"),
    )


@pytest.mark.parametrize("dispatch", [Dispatch.EINSUM, Dispatch.GATHER])
def test_switch(dispatch):
    """One expert by its unnormalized gate; each has two places, so that tokens are dropped."""
    stored = _stored("switch")
    params = _params(k=1, normalized=False, z_loss_weight=0.5).Set(dispatch=dispatch)
    y, routing, gradients = _trained(params, _switch_theta(stored), stored)
    np.testing.assert_allclose(y, stored["y"], rtol=1e-5, atol=1e-5)
    _assert_gradients(gradients, stored, _switch_theta(stored, "d."))
    np.testing.assert_allclose(routing.balance_loss, stored["balance_loss"], rtol=1e-5)
    np.testing.assert_allclose(routing.router_loss, 0.5 * stored["z_loss"], rtol=1e-5)

    is_dropped = ~stored["y"].any(-1)
    assert is_dropped.any()
    np.testing.assert_allclose(routing.overflow, is_dropped.mean(), rtol=1e-6)
    np.testing.assert_allclose(routing.dropped_choices, is_dropped.mean(), rtol=1e-6)
