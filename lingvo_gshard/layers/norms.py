"""Normalizations of the last dim, M, of a tensor. Both compute in float32, whatever its dtype.

Sums of 16-bit numbers would lose most of their digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, constant
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla


class LayerNorm(BaseLayer):
    """Normalizes the last dim to mean 0 and variance 1, then applies a learned scale and bias."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        return _params(super().Params())

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        self.CreateVariable("scale", constant((self.p.dim,), "M", 1.0))
        self.CreateVariable("bias", constant((self.p.dim,), "M", 0.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes x [..., M]; the result has the dtype of x."""

        # TensorFlow's own gradient would take twice the reductions.
        @tf.custom_gradient
        def normalize(
            wide: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor
        ) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
            centred = wide - _mean(wide)
            inverse_deviation = tf.math.rsqrt(_mean(tf.square(centred)) + self.p.epsilon)
            normalized = centred * inverse_deviation

            def gradient(d_y: tf.Tensor) -> list[tf.Tensor]:
                d_normalized = d_y * scale
                mean = _mean(d_normalized)
                along = _mean(d_normalized * normalized)
                # XLA would compute what follows within its library's reductions, which take twice
                # as long for it on a CPU.
                mean, along = xla.optimization_barrier(mean, along)

                # The result does not depend on x's mean and scale, so neither does the gradient.
                d_x = inverse_deviation * (d_normalized - mean - along * normalized)
                rows = list(range(d_y.shape.rank - 1))
                return [d_x, tf.reduce_sum(d_y * normalized, rows), tf.reduce_sum(d_y, rows)]

            return normalized * scale + bias, gradient

        return tf.cast(normalize(tf.cast(x, tf.float32), theta.scale, theta.bias), x.dtype)


class RMSNorm(BaseLayer):
    """Divides by the root mean square and applies a learned scale (Zhang and Sennrich 2019)."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        return _params(super().Params())

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        self.CreateVariable("scale", constant((self.p.dim,), "M", 1.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes x [..., M]; the result has the dtype of x."""
        wide = tf.cast(x, tf.float32)
        mean_square = tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True)
        normalized = wide * tf.math.rsqrt(mean_square + self.p.epsilon)

        return tf.cast(normalized * theta.scale, x.dtype)


def _mean(x: tf.Tensor) -> tf.Tensor:
    """Returns the mean over the last dim, [..., 1]."""
    return tf.reduce_mean(x, axis=-1, keepdims=True)


def _params(p: InstantiableParams) -> InstantiableParams:
    p.Define("dim", REQUIRED, "M, the model dimension.")
    p.Define("epsilon", 1e-6, "Keeps what is divided by above 0 where all elements are equal.")
    return p
