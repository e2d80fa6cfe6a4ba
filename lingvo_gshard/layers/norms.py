"""Normalizations of the last dim, M, of a tensor. Both compute in float32, whatever its dtype.

Sums of 16-bit numbers would lose most of their digits.
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, constant
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap


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
        wide = tf.cast(x, tf.float32)
        centred = wide - tf.reduce_mean(wide, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        normalized = centred * tf.math.rsqrt(variance + self.p.epsilon)

        return tf.cast(normalized * theta.scale + theta.bias, x.dtype)


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


def _params(p: InstantiableParams) -> InstantiableParams:
    p.Define("dim", REQUIRED, "M, the model dimension.")
    p.Define("epsilon", 1e-6, "Keeps what is divided by above 0 where all elements are equal.")
    return p
