"""Products with large weights: a block that is computed again may keep what they gave.

A layer asks its context for one, `context.product("BLH", project, x, weight)`; what that does
depends on the pass: it is computed, computed and recorded, or replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf


class Products(Protocol):
    """What gives a layer its products."""

    def __call__(
        self, dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor
    ) -> tf.Tensor:
        """product(*factors).

        Args:
          dims: of the result, one letter each.
          product: linear in each of its factors, so that its gradients don't need its result.
          factors: all that it has gradients for.
        """


def computed(dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
    """The product, and nothing else."""
    del dims
    return product(*factors)


class Recorded:
    """Computes products and records them.

    Attributes:
      results: (dims, tensor) of each, in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self.results: list[tuple[str, tf.Tensor]] = []

    def __call__(
        self, dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor
    ) -> tf.Tensor:
        result = product(*factors)
        self.results.append((dims, result))
        return result


class Replayed:
    """Gives what was recorded, in the same order, with the gradients that the products have."""

    def __init__(self, results: Sequence[tf.Tensor]) -> None:
        self._left = list(results)

    def __call__(
        self, dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor
    ) -> tf.Tensor:
        result, scope = self._left.pop(0), tf.get_current_name_scope()

        @tf.custom_gradient
        def kept(*factors: tf.Tensor):
            def gradient(d_result: tf.Tensor) -> list[tf.Tensor]:
                with tf.name_scope(scope and f"{scope}/"), tf.GradientTape() as tape:
                    tape.watch(factors)
                    again = product(*factors)  # Its value is not read, so never computed.
                    return tape.gradient(again, factors, d_result)

            return tf.identity(result), gradient

        return kept(*factors)
