"""The training step of a decoder: its arguments, its loss, and AdamW."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from repro.published.dense_decoder import experts, gradient_totals, splits
from repro.published.dense_decoder.attention import KERNELS, attention
from repro.published.dense_decoder.sizes import Model, Run, weight_letters, weight_shapes

# AdamW's hyperparameters, which do not affect the time.
_LEARNING_RATE = 1e-3
_BETA1 = 0.9
_BETA2 = 0.95
_EPSILON = 1e-8
_WEIGHT_DECAY = 0.1

_ROPE_BASE = 10_000.0
_NORM_EPSILON = 1e-5

Tree = dict[str, Any]


def arguments(model: Model, run: Run, mesh: Mesh | AbstractMesh) -> tuple[Tree, Any]:
    """Returns the types and shardings of a step's state and tokens.

    The tokens are [microbatches, rows of each, T + 1]; the last token of a row is only a label.
    """
    letters = weight_letters(model)
    weights = {}
    for name, shape in weight_shapes(model).items():
        sharding = NamedSharding(mesh, splits.spec(run, letters[name]))
        weights[name] = jax.ShapeDtypeStruct(shape, run.weight_dtype, sharding=sharding)

    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = {"params": weights, "slots": {"mean": weights, "square": weights}, "step": step}
    token_shape = (run.microbatches, run.rows // run.microbatches, run.length + 1)
    sharding = NamedSharding(mesh, PartitionSpec(None, splits.ROWS))
    return state, jax.ShapeDtypeStruct(token_shape, jnp.int32, sharding=sharding)


def initial_weights(model: Model, seed: int) -> Tree:
    """Returns random weights by name, as arrays on the default device."""
    weights = {}
    key = jax.random.key(seed)
    for index, (name, shape) in enumerate(weight_shapes(model).items()):
        noise = jax.random.normal(jax.random.fold_in(key, index), shape)
        # Norms begin near one. The scale of the other weights affects neither tests nor times.
        weights[name] = 1.0 + 0.1 * noise if name.endswith("norm") else 0.1 * noise
    return weights


def train_step(model: Model, run: Run, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the jitted step(state, tokens) -> (state, loss), which donates the state."""

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        params = state["params"]
        loss_of = functools.partial(_loss, model, run, mesh)
        if run.microbatches == 1:
            (loss, _), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, tokens[0])
        else:
            loss, gradients = _accumulated(loss_of, params, tokens)
        return _adam_w(state, gradients), loss

    return jax.jit(step, donate_argnums=0)


def _accumulated(loss_of: Callable, params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
    """Returns the mean loss and gradients of microbatches, which run one after the other.

    The backward pass adds each layer's gradients to the sums as soon as they are known, as PyTorch
    does. So there is one tree of float32 sums, and none of a microbatch's own gradients.
    """

    def add(sums: tuple[jax.Array, Tree], microbatch: jax.Array) -> tuple[Any, None]:
        total_loss, totals = sums

        def of_totals(totals: Tree) -> tuple[jax.Array, Tree]:
            return loss_of(params, microbatch, totals)

        (loss, _), pull_back = jax.vjp(of_totals, totals)
        (totals,) = pull_back((jnp.ones_like(loss), totals))
        return (total_loss + loss, totals), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    sums, _ = jax.lax.scan(add, zeros, tokens)
    loss, gradients = jax.tree.map(lambda total: total / len(tokens), sums)
    return loss, gradients


def _adam_w(state: Tree, gradients: Tree) -> Tree:
    """Returns the state after one step of AdamW (Loshchilov and Hutter, 2019)."""
    step = state["step"] + 1
    slots = state["slots"]
    scale1 = 1 / (1 - _BETA1**step)
    scale2 = 1 / (1 - _BETA2**step)

    params = {}
    means = {}
    squares = {}
    for name, gradient in gradients.items():
        means[name] = _BETA1 * slots["mean"][name] + (1 - _BETA1) * gradient
        squares[name] = _BETA2 * slots["square"][name] + (1 - _BETA2) * gradient**2
        update = scale1 * means[name] / (jnp.sqrt(scale2 * squares[name]) + _EPSILON)
        weight = state["params"][name]
        stepped = weight - _LEARNING_RATE * (update + _WEIGHT_DECAY * weight)
        params[name] = stepped.astype(weight.dtype)
    return {"params": params, "slots": {"mean": means, "square": squares}, "step": step}


def _loss(
    model: Model,
    run: Run,
    mesh: Mesh | AbstractMesh,
    params: Tree,
    tokens: jax.Array,
    totals: Tree | None = None,
) -> tuple[jax.Array, Tree]:
    """Returns the mean cross entropy of tokens [B, T + 1], and the unchanged totals.

    Given `totals`, one for each weight, the gradients of the weights are added to the cotangents of
    the totals instead; see gradient_totals.py.
    """
    totals = dict(totals or {})  # By default none.
    letters = weight_letters(model)
    own = {name: params[name] for name in params if letters[name].startswith("L")}
    shared = {name: params[name] for name in params if name not in own}
    for name in shared:
        if name in totals:
            shared[name], totals[name] = gradient_totals.tapped(shared[name], totals[name])

    table = splits.gathered(run, mesh, letters["embedding"], shared["embedding"])
    x = table[tokens[:, :-1]]
    if model.positions == "learned":
        positions = splits.gathered(run, mesh, letters["positions"], shared["positions"])
        x = x + positions[: run.length]
    x = splits.between(mesh, x)

    block = jax.checkpoint(functools.partial(_block, model, run, mesh), policy=_is_kept(run))
    own_totals = {name: totals[name] for name in own if name in totals}
    x, own_totals = gradient_totals.scan(block, x, own, own_totals)

    with jax.named_scope("softmax"):
        x = _norm(x, shared["final_norm"], shared.get("final_norm_bias"))
        head = table
        if not model.tied:
            head = splits.gathered(run, mesh, letters["head"], shared["head"])
        # In memory, logits have the activations' dtype, as in MaxText and with PyTorch's autocast.
        logits = jnp.einsum("BTM,VM->BTV", x, head).astype(jnp.float32)
        is_label = jnp.arange(model.vocab) == tokens[:, 1:, None]
        label_logits = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits)
    return loss, totals | own_totals


def _is_kept(run: Run) -> Callable[..., bool]:
    """Returns the policy that decides which operations' results are kept for the backward pass."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def policy(primitive: Any, *args: Any, **parameters: Any) -> bool:
        is_kernel = primitive.name in KERNELS
        match run.remat:
            case "full" if is_kernel:
                return "attention" in run.kept
            case "full":
                return primitive.name == "name" and parameters["name"] in run.kept
            case "minimal":
                return is_product(primitive, *args, **parameters)
        return is_kernel or is_product(primitive, *args, **parameters)

    return policy


def _block(model: Model, run: Run, mesh: Mesh | AbstractMesh, x: jax.Array, own: Tree) -> jax.Array:
    """Returns the activations [B, T, M] after one layer with its `own` weights."""
    letters = weight_letters(model)

    def weight(name: str) -> jax.Array:
        return splits.gathered(run, mesh, letters[name][1:], own[name])

    def project(equation: str, inputs: jax.Array, name: str) -> jax.Array:
        result = jnp.einsum(equation, inputs, weight(name))
        bias = own.get(f"{name}_bias")
        if bias is not None:
            result = result + bias.astype(run.dtype)
        return checkpoint_name(result, name)

    x = checkpoint_name(x, "input")
    with jax.named_scope("attention"):
        y = _norm(x, own["attention_norm"], own.get("attention_norm_bias"))
        query = project("BTM,MND->BTND", y, "query")
        key = project("BTM,MKD->BTKD", y, "key")
        value = project("BTM,MKD->BTKD", y, "value")
        if model.positions == "rope":
            query = _rotated(query)
            key = _rotated(key)
        context = attention(run, mesh, query, key, value)
        x = splits.between(mesh, x + project("BTND,NDM->BTM", context, "output"))

    with jax.named_scope("mlp"):
        y = _norm(x, own["mlp_norm"], own.get("mlp_norm_bias"))
        if model.E:
            return splits.between(mesh, x + experts.layer(model, run, mesh, y, own))
        hidden = project("BTM,MH->BTH", y, "up")
        match model.activation:
            case "relu":
                hidden = jax.nn.relu(hidden)
            case "gelu":
                hidden = jax.nn.gelu(hidden)
            case "silu_gated":
                hidden = hidden * jax.nn.silu(project("BTM,MH->BTH", y, "gate"))
        return splits.between(mesh, x + project("BTH,HM->BTM", hidden, "down"))


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns RMSNorm of activations, or LayerNorm if there is a bias, computed in float32."""
    wide = x.astype(jnp.float32)
    if bias is not None:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide**2, axis=-1, keepdims=True)
    normed = scale * wide * jax.lax.rsqrt(variance + _NORM_EPSILON)
    if bias is not None:
        normed = normed + bias
    return normed.astype(x.dtype)


def _rotated(heads: jax.Array) -> jax.Array:
    """Returns queries or keys [B, T, N, D] rotated by their positions (Su et al., 2021)."""
    length = heads.shape[1]
    half = heads.shape[-1] // 2
    rates = _ROPE_BASE ** (-jnp.arange(half) / half)
    angles = jnp.arange(length)[:, None, None] * rates
    left, right = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned_left = left * jnp.cos(angles) - right * jnp.sin(angles)
    turned_right = right * jnp.cos(angles) + left * jnp.sin(angles)
    return jnp.concatenate([turned_left, turned_right], axis=-1).astype(heads.dtype)
