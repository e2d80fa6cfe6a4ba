"""Normalizations of activations and of attention's heads.

All compute in float32, whatever the dtype: sums of 16-bit numbers would lose most of their digits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, constant
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla


class Over(enum.Enum):
    """What a norm of queries or keys takes its mean over."""

    HEAD = "head"  # The elements of each head, as in Qwen3: all heads share their D scales.
    ALL_HEADS = "all_heads"  # Those of all heads together, as in OLMoE, with N * D scales.


class Norm(BaseLayer):
    """The settings of a normalization."""

    class Params(BaseLayer.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        epsilon: float = setting(
            1e-6, "Keeps what is divided by above 0 where all elements are equal."
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        self._check_setting("epsilon", self.p.epsilon > 0, "above 0")


class LayerNorm(Norm):
    """Normalizes the last dim to mean 0 and variance 1, then applies a learned scale and bias."""

    def __init__(self, params: Norm.Params, *args: Any) -> None:
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
                # Without the barrier XLA would compute the rest within its library's reductions,
                # which then take twice as long on a CPU.
                mean, along = xla.optimization_barrier(mean, along)

                # The result does not depend on x's mean and scale, so neither does the gradient.
                d_x = inverse_deviation * (d_normalized - mean - along * normalized)
                rows = list(range(d_y.shape.rank - 1))
                return [d_x, tf.reduce_sum(d_y * normalized, rows), tf.reduce_sum(d_y, rows)]

            return normalized * scale + bias, gradient

        return tf.cast(normalize(tf.cast(x, tf.float32), theta.scale, theta.bias), x.dtype)


class RMSNorm(Norm):
    """Divides by the root mean square and applies a learned scale (Zhang and Sennrich 2019)."""

    def __init__(self, params: Norm.Params, *args: Any) -> None:
        super().__init__(params, *args)
        self.CreateVariable("scale", constant((self.p.dim,), "M", 1.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes x [..., M]; the result has the dtype of x."""
        return _rms_normalized(x, theta.scale, [-1], self.p.epsilon)


class NoHeadNorm(BaseLayer):
    """Queries and keys without a norm, as in the paper."""

    class Params(BaseLayer.Params):
        num_heads: int | None = setting(None, "N; set by the attention.")
        head_dim: int | None = setting(None, "D; set by the attention.")

    p: Params

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns queries or keys [B, L, N, D], before positions rotate them."""
        return x


class HeadRMSNorm(NoHeadNorm):
    """RMSNorm of queries or keys, which bounds the logits of attention (Henry et al. 2020)."""

    class Params(NoHeadNorm.Params):
        over: Over = setting(Over.HEAD, "HEAD or ALL_HEADS.")
        epsilon: float = setting(1e-6, "As in RMSNorm.")

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        n = self.p.num_heads
        d = self.p.head_dim
        assert n is not None and d is not None, self.path
        self._check_setting("epsilon", self.p.epsilon > 0, "above 0")
        is_by_head = self.p.over is Over.HEAD
        scale = constant((d,), "D", 1.0) if is_by_head else constant((n, d), "ND", 1.0)
        self.CreateVariable("scale", scale)

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        axes = [-1] if self.p.over is Over.HEAD else [-2, -1]
        return _rms_normalized(x, theta.scale, axes, self.p.epsilon)


def _rms_normalized(x: tf.Tensor, scale: tf.Tensor, axes: list[int], epsilon: float) -> tf.Tensor:
    """Divides x by the root mean square over `axes`, and multiplies it by the scale."""
    wide = tf.cast(x, tf.float32)
    mean_square = tf.reduce_mean(tf.square(wide), axis=axes, keepdims=True)
    normalized = wide * tf.math.rsqrt(mean_square + epsilon)
    return tf.cast(normalized * scale, x.dtype)


def _mean(x: tf.Tensor) -> tf.Tensor:
    """Returns the mean over the last dim, [..., 1]."""
    return tf.reduce_mean(x, axis=-1, keepdims=True)
