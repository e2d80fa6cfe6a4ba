"""Products with large weights, whose results a rematerialized block may keep.

A layer computes such a product by `context.product("BLH", project, x, weight)`. Depending on the
pass, the product is computed, computed and recorded, or replaced by the recorded result.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf


class Products(Protocol):
    """The type of `context.product`."""

    def __call__(
        self, dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor
    ) -> tf.Tensor:
        """Returns product(*factors).

        Args:
          dims: the dims of the result, one letter each.
          product: linear in each of its factors, so that its gradients don't need its result.
          *factors: all tensors that the product has gradients for.
        """


def computed(dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor) -> tf.Tensor:
    """Computes the product and records nothing."""
    del dims
    return product(*factors)


class Recorded:
    """Computes products and records them.

    Attributes:
      results: the (dims, tensor) of each product, in the order of the calls.
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
    """Returns recorded results in the same order, with the gradients of the products."""

    def __init__(self, results: Sequence[tf.Tensor]) -> None:
        self._remaining = list(results)

    def __call__(
        self, dims: str, product: Callable[..., tf.Tensor], *factors: tf.Tensor
    ) -> tf.Tensor:
        result, scope = self._remaining.pop(0), tf.get_current_name_scope()

        @tf.custom_gradient
        def replayed(*factors: tf.Tensor):
            def gradient(d_result: tf.Tensor) -> list[tf.Tensor]:
                with tf.name_scope(scope and f"{scope}/"), tf.GradientTape() as tape:
                    tape.watch(factors)
                    again = product(*factors)  # The value is unused, so it is never computed.
                    return tape.gradient(again, factors, d_result)

            return tf.identity(result), gradient

        return replayed(*factors)
