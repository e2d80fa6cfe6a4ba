"""The layer of experts on several devices beside NumPy, and beside gradients on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from repro.published import mixture_layer
from repro.published.mixture_layer import Layer
from tests.xla_plan import samples


def _balanced(layer, num_devices, rng):
    """Returns weights and x; token t chooses K experts from expert t % E on."""
    weights = {}
    for name, shape in mixture_layer.weight_shapes(layer).items():
        weights[name] = rng.standard_normal(shape, np.float32) / 4
    weights["router"] = np.eye(layer.M, layer.E, dtype=np.float32)

    x = rng.standard_normal((num_devices * layer.tokens, layer.M), np.float32)
    for t in range(len(x)):
        for k in range(layer.K):
            x[t, (t + k) % layer.E] = 9.0 - k
    return weights, x


def _silu_gated(rows):
    gate, linear = np.split(rows, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * linear


def _literal(layer, weights, x):
    """Returns y token by token and expert by expert."""
    y = np.zeros_like(x)
    for t, token in enumerate(x):
        logits = token @ weights["router"]
        gates = np.exp(logits) / np.exp(logits).sum()
        for e in np.argsort(-logits)[: layer.K]:
            y[t] += gates[e] * (_silu_gated(token @ weights["up"][e]) @ weights["down"][e])
        if layer.shared_H:
            y[t] += _silu_gated(token @ weights["shared_up"]) @ weights["shared_down"]
    return y


def _dense(layer, weights, x):
    """Returns y as a differentiable function in which every expert computes all tokens."""
    gates = jax.nn.softmax(x @ weights["router"])
    threshold = jnp.sort(gates, axis=-1)[:, -layer.K, None]
    gates = jnp.where(gates >= threshold, gates, 0)
    gate, linear = jnp.split(jnp.einsum("TM,EMH->TEH", x, weights["up"]), 2, axis=-1)
    outputs = jnp.einsum("TEH,EHM->TEM", jax.nn.silu(gate) * linear, weights["down"])
    y = jnp.einsum("TE,TEM->TM", gates, outputs)
    if layer.shared_H:
        gate, linear = jnp.split(x @ weights["shared_up"], 2, axis=-1)
        y = y + (jax.nn.silu(gate) * linear) @ weights["shared_down"]
    return y


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, 6])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_outputs_and_gradients_equal_those_of_one_device(num_devices, shared):
    layer = Layer(tokens=16, M=12, H=5, E=8, K=2, shared_H=shared)
    rng = np.random.default_rng(3)
    weights, x = _balanced(layer, num_devices, rng)
    d_y = rng.standard_normal(x.shape, np.float32)

    mesh = jax.make_mesh((num_devices,), ("experts",), axis_types=(AxisType.Auto,))
    run = jax.jit(functools.partial(mixture_layer.forward_and_backward, layer, mesh))
    y, gradients = run(weights, x, d_y)
    np.testing.assert_allclose(y, _literal(layer, weights, x), rtol=1e-4, atol=1e-4)

    _, pull_back = jax.vjp(functools.partial(_dense, layer), weights, x)
    for ours, expected in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(pull_back(d_y)), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-3)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="E=5: expected a divisor of 32, tokens"):
        Layer(tokens=16, M=12, H=5, E=5, K=2)


def test_records_of_one_layer_share_a_plan(tmp_path, monkeypatch):
    made = []

    def make(function, layer):
        made.append(layer)
        return samples.program(samples.cost(), topology="h100:1x8")

    monkeypatch.setattr(mixture_layer.own_process, "call", make)
    for record in mixture_layer.PUBLISHED:
        mixture_layer.load_or_make(record, tmp_path)
        assert mixture_layer.load(record, tmp_path) is not None
    assert made == list(dict.fromkeys(record.layer for record in mixture_layer.PUBLISHED))


@pytest.mark.slow  # Compiles for H100.
def test_a_plan_counts_the_products_of_the_chosen_experts():
    layer = Layer(tokens=256, M=256, H=512, E=16, K=2, shared_H=128)
    plan = mixture_layer.make(layer)
    rows = layer.tokens * layer.K
    weights = 3 * layer.M * (rows * layer.H + layer.tokens * layer.shared_H)
    router = layer.tokens * layer.M * layer.E
    assert sum(plan.cost.flops_per_core.values()) == pytest.approx(6 * (weights + router), rel=0.01)
