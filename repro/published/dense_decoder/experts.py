"""Layers of experts: each token goes to some of E experts, and each expert has equally many rows.

B rows, T tokens per row, S tokens of a device, D devices that share the experts, C rows of an
expert from one device, M model, H hidden.

The program is right only for balanced routing, C = S * chosen / E: a buffer has exactly C rows.
Sources that publish rates force it, or compute as many rows in groups of other sizes.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from repro.published.dense_decoder import splits
from repro.published.dense_decoder.sizes import Model, Run, weight_letters

_NAMES = ("router", "up", "gate", "down")

Weights = dict[str, jax.Array]
Compute = Callable[[jax.Array], jax.Array]


def layer(
    model: Model, run: Run, mesh: Mesh | AbstractMesh, x: jax.Array, own: Weights
) -> jax.Array:
    """Returns the sum of the experts' results for activations x [B, T, M].

    Raises ValueError for a mesh with tensor parallelism, or if the experts or rows do not divide.
    """
    _check(model, run)
    letters = weight_letters(model)
    weights = {name: own[name].astype(run.dtype) for name in _NAMES}
    specs = {name: splits.spec(run, letters[name][1:]) for name in _NAMES}
    rows = PartitionSpec(splits.ROWS)
    on_device = jax.shard_map(
        functools.partial(_on_device, model, run),
        mesh=mesh,
        in_specs=(specs, rows),
        out_specs=rows,
        check_vma=False,
    )
    return on_device(weights, x)


def _check(model: Model, run: Run) -> None:
    if run.tensor > 1:
        raise ValueError(f"tensor={run.tensor}: expected 1 for a model with experts.")
    if run.experts == "exchanged" and model.E % run.fsdp:
        raise ValueError(f"E={model.E}: expected a multiple of fsdp={run.fsdp}.")
    choices = run.rows_at_once * run.length * model.chosen
    if choices % model.E:
        raise ValueError(f"E={model.E}: expected a divisor of a device's {choices} choices.")


def _on_device(model: Model, run: Run, weights: Weights, x: jax.Array) -> jax.Array:
    """Returns a device's part of the sum, given its parts of the weights and of x."""
    axis = "fsdp" if run.experts == "exchanged" else None
    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
    weights = dict(weights, router=gather(weights["router"]))
    if axis is None:
        # The gradient of a gather is a ReduceScatter.
        weights["up"] = gather(weights["up"], axis=1)
        weights["gate"] = gather(weights["gate"], axis=1)
        weights["down"] = gather(weights["down"], axis=2)

    def compute(buffers: jax.Array) -> jax.Array:
        hidden = jnp.einsum("ECM,EMH->ECH", buffers, weights["up"])
        hidden = hidden * jax.nn.silu(jnp.einsum("ECM,EMH->ECH", buffers, weights["gate"]))
        return jnp.einsum("ECH,EHM->ECM", hidden, weights["down"])

    tokens = x.reshape(-1, model.M)
    return routed(tokens, weights["router"], model.chosen, compute, axis).reshape(x.shape)


def routed(
    x: jax.Array, router: jax.Array, chosen: int, compute: Compute, axis: str | None = None
) -> jax.Array:
    """Returns the sum [S, M] of each token's experts, weighted by their gates.

    Args:
      x: the tokens [S, M] of a device.
      router: the router's weights [M, E].
      chosen: the number of experts of a token.
      compute: returns the results of a device's experts for their rows [E/D, D * C, M].
      axis: the axis of the D devices that share the experts, to which rows travel by all-to-all;
        None if each device has all experts.
    """
    num_experts = router.shape[1]
    logits = jnp.dot(x, router, preferred_element_type=jnp.float32)
    gates, experts = jax.lax.top_k(jax.nn.softmax(logits), chosen)

    # A buffer of C rows for each expert.
    order = jnp.argsort(experts.reshape(-1))
    buffers = x[order // chosen].reshape(num_experts, -1, x.shape[1])

    if axis is None:
        rows = compute(buffers)
    else:
        # [E, C, M] of all experts from this device, and [E/D, D * C, M] of its experts from all.
        exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)
        own = compute(exchange(buffers, split_axis=0, concat_axis=1))
        rows = exchange(own, split_axis=1, concat_axis=0)

    rows = rows.reshape(-1, x.shape[1])
    by_token = rows[jnp.argsort(order)].reshape(-1, chosen, x.shape[1])
    return jnp.einsum("SK,SKM->SM", gates.astype(x.dtype), by_token)
