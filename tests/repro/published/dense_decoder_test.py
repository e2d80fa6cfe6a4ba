"""The decoder, compared with a literal computation, on one and on several devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from repro.published.dense_decoder import attention, splits, step
from repro.published.dense_decoder.sizes import Model, Run
from tests import exhaustive

_GATED = {"K": 2, "activation": "silu_gated", "tied": False}
# Each token goes to all experts, as routing has to be balanced.
_MIXTURE = {**_GATED, "E": 4, "chosen": 4}
_BIASED = {"activation": "gelu", "positions": "learned", "max_length": 6, "biases": True}
_ROWS = 8
_LENGTH = 6


def _model(**options):
    return Model(layers=2, M=16, H=24, N=4, D=8, vocab=40, **options)


def _tokens(run):
    shape = (run.microbatches, run.rows // run.microbatches, run.length + 1)
    return np.random.default_rng(5).integers(0, 40, shape).astype(np.int32)


def _literal_norm(x, scale, bias):
    if bias is None:
        return scale * x / jnp.sqrt(jnp.mean(x * x) + 1e-5)
    x = x - jnp.mean(x)
    return scale * x / jnp.sqrt(jnp.mean(x * x) + 1e-5) + bias


def _literal_rope(vector, position):
    half = len(vector) // 2
    turned = []
    for i in range(half):
        angle = position / 10_000 ** (i / half)
        turned.append(vector[i] * math.cos(angle) - vector[half + i] * math.sin(angle))
    for i in range(half):
        angle = position / 10_000 ** (i / half)
        turned.append(vector[half + i] * math.cos(angle) + vector[i] * math.sin(angle))
    return jnp.stack(turned)


def _literal_attention(model, w, layer, states):
    """Returns attention's addition to each state, head by head and pair by pair."""
    found = {"query": [], "key": [], "value": []}
    for i, state in enumerate(states):
        y = _literal_norm(state, w["attention_norm"][layer], _bias(w, "attention_norm", layer))
        for name, kept in found.items():
            heads = _plus(jnp.tensordot(y, w[name][layer], 1), w, name, layer)
            if model.positions == "rope" and name != "value":
                heads = jnp.stack([_literal_rope(head, i) for head in heads])
            kept.append(heads)

    added = []
    for i in range(len(states)):
        total = jnp.zeros(())
        for n in range(model.N):
            k = n * model.K // model.N
            query = found["query"][i][n] / math.sqrt(model.D)
            logits = [query @ found["key"][j][k] for j in range(i + 1)]
            shares = jax.nn.softmax(jnp.stack(logits))
            context = sum(share * found["value"][j][k] for j, share in enumerate(shares))
            total = total + context @ w["output"][layer, n]
        added.append(_plus(total, w, "output", layer))
    return added


def _literal_mlp(model, w, layer, state):
    y = _literal_norm(state, w["mlp_norm"][layer], _bias(w, "mlp_norm", layer))
    if model.E:
        return _literal_experts(w, layer, y)
    hidden = _plus(y @ w["up"][layer], w, "up", layer)
    if model.activation == "gelu":
        # jax.nn.gelu uses the form with tanh.
        cube = hidden + 0.044715 * hidden**3
        hidden = 0.5 * hidden * (1 + jnp.tanh(math.sqrt(2 / math.pi) * cube))
    elif model.activation == "relu":
        hidden = jnp.maximum(hidden, 0)
    else:
        gate = y @ w["gate"][layer]
        hidden = hidden * gate / (1 + jnp.exp(-gate))
    return _plus(hidden @ w["down"][layer], w, "down", layer)


def _literal_experts(w, layer, y):
    """Returns the sum of all experts' results, weighted by the router's softmax."""
    shares = jax.nn.softmax(y @ w["router"][layer])
    total = jnp.zeros_like(y)
    for e, share in enumerate(shares):
        hidden = y @ w["up"][layer][e]
        gate = y @ w["gate"][layer][e]
        total = total + share * ((hidden * gate / (1 + jnp.exp(-gate))) @ w["down"][layer][e])
    return total


def _bias(w, name, layer):
    return w[f"{name}_bias"][layer] if f"{name}_bias" in w else None


def _plus(value, w, name, layer):
    bias = _bias(w, name, layer)
    return value if bias is None else value + bias


def _literal_row_loss(model, w, row):
    """Returns the mean cross entropy of one row, token by token."""
    states = [w["embedding"][token] for token in row[:-1]]
    if "positions" in w:
        states = [state + w["positions"][i] for i, state in enumerate(states)]
    for layer in range(model.layers):
        added = _literal_attention(model, w, layer, states)
        states = [state + more for state, more in zip(states, added, strict=True)]
        states = [state + _literal_mlp(model, w, layer, state) for state in states]

    head = w["embedding"] if model.tied else w["head"]
    losses = []
    for state, label in zip(states, row[1:], strict=True):
        logits = head @ _literal_norm(state, w["final_norm"], w.get("final_norm_bias"))
        losses.append(jnp.log(jnp.sum(jnp.exp(logits))) - logits[label])
    return sum(losses) / len(losses)


def _literal_step(model, weights, tokens):
    """Returns the loss, and the weights after one step of AdamW from its initial state."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    row_loss = jax.jit(jax.value_and_grad(lambda w, row: _literal_row_loss(model, w, row)))
    losses = [row_loss(weights, row) for row in rows]
    loss = np.mean([np.asarray(loss) for loss, _ in losses])
    after = {}
    for name, weight in weights.items():
        gradient = np.mean([np.asarray(gradients[name]) for _, gradients in losses], axis=0)
        update = gradient / (np.abs(gradient) + 1e-8)
        stepped = np.asarray(weight) - 1e-3 * (update + 0.1 * np.asarray(weight))
        # AdamW's first step is the gradient's sign, which is noise if the gradient is. The gradient
        # of the keys' biases is zero, because they add the same to all logits of a query.
        after[name] = np.where(np.abs(gradient) > 1e-6, stepped, np.nan)
    return loss, after


def _step(model, run, weights, tokens):
    devices = jax.devices()[: run.devices]
    types = (jax.sharding.AxisType.Auto,) * 3
    sizes = (run.data, run.fsdp, run.tensor)
    mesh = jax.make_mesh(sizes, splits.AXES, axis_types=types, devices=devices)
    zeros = jax.tree.map(np.zeros_like, weights)
    state = {"params": weights, "slots": {"mean": zeros, "square": zeros}, "step": np.int32(0)}
    shapes = step.arguments(model, run, mesh)
    placed = jax.tree.map(
        lambda value, spec: jax.device_put(np.asarray(value), spec.sharding),
        (state, tokens),
        shapes,
    )
    state, loss = step.train_step(model, run, mesh)(*placed)
    return float(loss), state["params"]


def _check(model, **options):
    run = Run(rows=_ROWS, length=_LENGTH, dtype="float32", **options)
    tokens = _tokens(run)
    weights = step.initial_weights(model, 3)
    loss, after = _literal_step(model, weights, tokens)
    own_loss, own_after = _step(model, run, weights, tokens)

    assert own_loss == pytest.approx(loss, rel=1e-5)
    for name, weight in after.items():
        is_known = ~np.isnan(weight)
        assert is_known.mean() > 0.4 or name == "key_bias", name
        np.testing.assert_allclose(
            np.asarray(own_after[name])[is_known], weight[is_known], atol=2e-5, err_msg=name
        )


@pytest.mark.slow
def test_a_partitioned_step_is_the_literal_one():
    _check(_model(**_GATED), fsdp=2, tensor=2, remat="minimal", microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["gathered", "exchanged"])
def test_a_mixtures_step_is_the_literal_one(experts):
    _check(_model(**_MIXTURE), data=2, fsdp=2, microbatches=2, experts=experts)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [_GATED, _BIASED, {}], ids=["gated", "biased", "plain"])
@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_steps_are_the_literal_ones_on_all_devices(options, axes):
    data, fsdp, tensor = axes
    _check(_model(**options), data=data, fsdp=fsdp, tensor=tensor, remat="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "remat"),
    [
        ((1, 2, 1), "none"),
        ((2, 2, 2), "full"),
        *(
            pytest.param(axes, remat, marks=exhaustive.RARE)
            for axes, remat in [
                ((1, 1, 1), "none"),
                ((1, 1, 1), "full"),
                ((1, 2, 1), "full"),
                ((2, 2, 1), "none"),
                ((2, 2, 1), "full"),
                ((2, 2, 2), "none"),
            ]
        ),
    ],
)
def test_microbatches_have_the_step_of_the_whole_batch(axes, remat):
    model = _model(**_BIASED)
    weights = step.initial_weights(model, 3)
    options = {"rows": _ROWS, "length": _LENGTH, "dtype": "float32", "remat": remat}
    whole = Run(**options)
    tokens = _tokens(whole)
    loss, after = _step(model, whole, weights, tokens)

    data, fsdp, tensor = axes
    parts = Run(**options, microbatches=2, data=data, fsdp=fsdp, tensor=tensor)
    own_loss, own_after = _step(model, parts, weights, tokens.reshape(2, 4, -1))

    assert own_loss == pytest.approx(loss, rel=1e-5)
    for name in weights:
        # The gradient of the keys' biases is zero, and its sign is noise.
        if name != "key_bias":
            np.testing.assert_allclose(own_after[name], after[name], atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_microbatches_need_one_tree_of_gradients(remat):
    model = Model(layers=16, M=128, H=512, N=4, D=32, vocab=64)
    gradients = 4 * model.weights

    for microbatches in (1, 2, 4):
        run = Run(rows=microbatches, length=8, remat=remat, microbatches=microbatches)
        mesh = jax.make_mesh(
            (1, 1, 1),
            splits.AXES,
            axis_types=(jax.sharding.AxisType.Auto,) * 3,
            devices=jax.devices()[:1],
        )
        lowered = step.train_step(model, run, mesh).lower(*step.arguments(model, run, mesh))
        temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
        assert gradients < temporaries < 1.3 * gradients


@pytest.mark.parametrize(("attention", "platform"), [("splash", "tpu"), ("flash", "cuda")])
@pytest.mark.parametrize(
    ("options", "calls"),
    [
        # One kernel forward, and two for the gradient.
        ({"remat": "none"}, 3),
        ({"kept": ("query", "attention")}, 3),
        ({"remat": "full"}, 4),  # The forward kernel runs once more.
        ({"remat": "minimal"}, 4),
    ],
)
def test_attention_is_repeated_unless_it_is_kept(attention, platform, options, calls):
    model = Model(layers=2, M=64, H=64, N=2, D=128, vocab=64)
    run = Run(rows=2, length=512, fsdp=2, attention=attention, **options)
    mesh = splits.abstract_mesh(run, "h100" if platform == "cuda" else None)
    with jax.sharding.use_abstract_mesh(mesh):
        jitted = step.train_step(model, run, mesh)
        traced = jitted.trace(*step.arguments(model, run, mesh))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    # Kernels are the only calls of custom programs, and each occurs once in a scan.
    assert text.count("custom_call @tpu_custom_call") + text.count("@__gpu$xla.gpu.triton") == calls


def test_weights_are_counted_by_hand():
    # There are 2 layers of 4 M N D + 2 M H + 2 M, an embedding and a norm.
    layer = 4 * 16 * 32 + 2 * 16 * 24 + 2 * 16
    assert _model().weights == 2 * layer + 40 * 16 + 16
    # Half of the keys' and values' heads, a third matrix, and a separate softmax.
    layer = 2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert _model(**_GATED).weights == 2 * layer + 2 * 40 * 16 + 16


def test_a_mixtures_weights_are_counted_by_hand():
    # Half of the keys' and values' heads, a router, four experts of three matrices, two norms.
    layer = 2 * 16 * 32 + 2 * 16 * 16 + 16 * 4 + 4 * 3 * 16 * 24 + 2 * 16
    assert _model(**_MIXTURE).weights == 2 * layer + 2 * 40 * 16 + 16


def test_experts_are_refused_where_they_do_not_divide():
    model = _model(**(_MIXTURE | {"chosen": 3}))
    for options, message in (
        ({"tensor": 2}, "tensor=2: expected 1 for a model with experts."),
        ({"fsdp": 8, "experts": "exchanged"}, "E=4: expected a multiple of fsdp=8."),
        ({"fsdp": 8}, "E=4: expected a divisor of a device's 15 choices."),
    ):
        run = Run(rows=8, length=5, **options)
        mesh = splits.abstract_mesh(run)
        with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=message):
            step.train_step(model, run, mesh).trace(*step.arguments(model, run, mesh))


def test_flops_of_kernels_are_those_of_causal_blocks():
    model = Model(layers=1, M=16, H=16, N=4, D=8, vocab=8)
    run = Run(rows=8, length=1024, fsdp=2, tensor=2, attention="splash")
    # A device has 4 rows and 2 heads, and computes 3 of 4 blocks of 512 x 512.
    product = 2 * 4 * 2 * 8 * 3 * 512**2
    assert attention.kernel_flops(model, run) == [
        f"splash_mha_fwd_residuals={2 * product}",
        f"splash_mha_dq_no_residuals={3 * product}",
        f"splash_mha_dkv_no_residuals={4 * product}",
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: _model(activation="tanh"), "activation='tanh': expected one of relu, gelu"),
        (lambda: _model(K=3), "K=3: expected a divisor of N=4."),
        (lambda: _model(chosen=2), "chosen=2: expected 1 to E=0 with experts alone."),
        (lambda: _model(E=4, chosen=2), "E=4: experts are only known with activation='silu_gated'"),
        (lambda: _model(max_length=4), "max_length=4: expected for learned positions alone."),
        (lambda: Run(rows=6, length=4, fsdp=4), "rows=6: expected a multiple of 4, data * fsdp"),
        (lambda: Run(rows=4, length=4, kept=("hidden",)), "kept='hidden': expected one of"),
        (lambda: Run(rows=4, length=4, remat="none", kept=("up",)), "remat='none': expected full"),
        (lambda: Run(rows=4, length=4, experts="all"), "experts='all': expected one of gathered"),
        (lambda: Run(rows=4, length=4, remat="some"), "remat='some': expected one of full,"),
    ],
)
def test_wrong_sizes_are_refused(build, message):
    with pytest.raises(ValueError) as error:
        build()
    assert message in str(error.value)
