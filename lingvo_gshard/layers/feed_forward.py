"""Dense layers: feed-forward and layer normalization. B batch, L length, M model, H hidden."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, constant, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.dropout import DropoutLayer

# Keeps the inverse of a standard deviation finite where all elements are equal.
_EPSILON = 1e-6


class FeedForwardLayer(BaseLayer):
    """wo · relu(wi · x): equation (2) of the paper with a single expert."""

    hidden_dropout: DropoutLayer

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("hidden_dim", REQUIRED, "H, the hidden dimension.")
        p.Define("hidden_dropout", DropoutLayer.Params().Set(rate=0.0), "Dropout after the ReLU.")
        return p

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        m = self.p.dim
        h = self.p.hidden_dim
        self.CreateChild("hidden_dropout", self.p.hidden_dropout)
        self.CreateVariable("wi", gaussian((m, h), "MH", fan_in=m))
        self.CreateVariable("wo", gaussian((h, m), "HM", fan_in=h))

    def FProp(self, theta: NestedMap, x: tf.Tensor, context: Context) -> tf.Tensor:
        """Maps x [B, L, M] to [B, L, M], computed in the dtype of x."""
        h_BLH = tf.nn.relu(context.einsum("BLM,MH->BLH", x, theta.wi))
        h_BLH = self.annotate(h_BLH, "BLH")
        h_BLH = self.hidden_dropout.FProp(theta.hidden_dropout, h_BLH, "BLH", context)

        y_BLM = context.einsum("BLH,HM->BLM", h_BLH, theta.wo)
        return self.annotate(y_BLM, "BLM")


class LayerNorm(BaseLayer):
    """Normalizes the last dim to mean 0 and variance 1, then applies a learned scale and bias."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        return p

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        self.CreateVariable("scale", constant((self.p.dim,), "M", 1.0))
        self.CreateVariable("bias", constant((self.p.dim,), "M", 0.0))

    def FProp(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Normalizes x [..., M]; the result has the dtype of x."""
        # In float32, because sums of 16-bit numbers lose most of their digits.
        wide = tf.cast(x, tf.float32)
        centred = wide - tf.reduce_mean(wide, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        normalized = centred * tf.math.rsqrt(variance + _EPSILON)

        return tf.cast(normalized * theta.scale + theta.bias, x.dtype)
