"""Gradients that the backward pass adds to totals of earlier microbatches, layer by layer.

A total passes through the forward pass unchanged, beside its weight. Its cotangent is the sum of
the gradients so far: it enters the backward pass with the sum of the earlier microbatches, and each
use of the weight adds its own gradient. So no tree of one microbatch's gradients is ever stored.
The weights themselves get no gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]
Block = Callable[[jax.Array, Tree], jax.Array]


@jax.custom_vjp
def tapped(weight: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a weight whose gradient is added to the cotangent of its total, and the total."""
    return weight, total


def _tapped_forward(weight: jax.Array, total: jax.Array) -> Any:
    return (weight, total), None


def _tapped_backward(_: None, cotangents: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
    gradient, total = cotangents
    return None, total + gradient


tapped.defvjp(_tapped_forward, _tapped_backward)


def scan(block: Block, x: jax.Array, weights: Tree, totals: Tree) -> tuple[jax.Array, Tree]:
    """Returns the activations after all layers, and the totals.

    Args:
      block: returns the activations after one layer with its own weights.
      x: the activations before the first layer.
      weights: stacked weights of the layers, by name.
      totals: one for each weight. If it is empty, the weights have gradients as usual.
    """
    if not totals:
        return jax.lax.scan(lambda x, own: (block(x, own), None), x, weights)[0], {}

    layer = _adding(block)
    num_layers = len(next(iter(weights.values())))

    def step(carry: tuple[jax.Array, Tree], xs: tuple[jax.Array, Tree]) -> tuple[Any, None]:
        index, own = xs
        return layer(*carry, own, index), None

    carry, _ = jax.lax.scan(step, (x, totals), (jnp.arange(num_layers), weights))
    return carry


def _adding(block: Block) -> Callable[..., tuple[jax.Array, Tree]]:
    """Returns a layer that adds its gradients to its own part of the totals' cotangents."""

    @jax.custom_vjp
    def layer(x: jax.Array, totals: Tree, own: Tree, index: jax.Array) -> tuple[jax.Array, Tree]:
        return block(x, own), totals

    def forward(x: jax.Array, totals: Tree, own: Tree, index: jax.Array) -> Any:
        y, pull_back = jax.vjp(block, x, own)
        return (y, totals), (pull_back, index)

    def backward(kept: Any, cotangents: tuple[jax.Array, Tree]) -> tuple[Any, ...]:
        pull_back, index = kept
        of_y, totals = cotangents
        of_x, gradients = pull_back(of_y)
        totals = {name: totals[name].at[index].add(gradients[name]) for name in totals}
        return of_x, totals, None, None

    layer.defvjp(forward, backward)
    return layer
