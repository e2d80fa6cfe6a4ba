"""The model's ends: embedding and cross entropy. B batch, L length, M model, V vocabulary."""

from __future__ import annotations

import math

from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap


class EmbeddingLayer(BaseLayer):
    """Rows of a [V, M] table, scaled by sqrt(M), plus sinusoids of the positions."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("vocab_size", REQUIRED, "V, the number of pieces.")
        p.Define("dim", REQUIRED, "M, the model dimension, which must be even.")
        return p

    def __init__(self, params: InstantiableParams, *args) -> None:
        super().__init__(params, *args)
        p = self.p
        if p.dim % 2:
            raise ValueError(f"{self.path}: dim must be even, got {p.dim}.")
        self.CreateVariable("table", gaussian((p.vocab_size, p.dim), "VM", fan_in=p.dim))

    def FProp(self, theta: NestedMap, ids: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Embeds ids at positions, both int32 [B, L]; returns [B, L, M]."""
        rows = self.annotate(tf.gather(theta.table, ids), "BLM")
        return rows * math.sqrt(self.p.dim) + sinusoids(positions, self.p.dim)


def sinusoids(positions: tf.Tensor, dim: int) -> tf.Tensor:
    """Sines, then cosines, of int32 positions [...], wavelengths 2 pi to 20000 pi: [..., dim]."""
    count = dim // 2
    rates = tf.constant([10000.0 ** (-i / max(1, count - 1)) for i in range(count)], tf.float32)
    angles = tf.cast(positions, tf.float32)[..., None] * rates
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def cross_entropies(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Cross entropy of softmax(logits) with the labels, and with the uniform distribution.

    `logits` are float32 [B, L, V], `labels` int32 [B, L], and both results float32 [B, L], in nats.
    The loss with label smoothing e is (1 - e) times the first plus e times the second.
    """

    def is_label(logits: tf.Tensor) -> tf.Tensor:
        return labels[..., None] == tf.range(logits.shape[-1])

    # TensorFlow's own gradient would keep three more [B, L, V] tensors in memory.
    @tf.custom_gradient
    def compute(logits: tf.Tensor):
        normalizer = tf.reduce_logsumexp(logits, -1)
        target = tf.reduce_sum(tf.where(is_label(logits), logits, 0.0), -1)

        def gradient(d_label: tf.Tensor, d_uniform: tf.Tensor) -> tf.Tensor:
            probability = tf.exp(logits - normalizer[..., None])
            both = (d_label + d_uniform)[..., None] * probability
            at_label = tf.where(is_label(logits), d_label[..., None], 0.0)
            return both - at_label - d_uniform[..., None] / logits.shape[-1]

        return (normalizer - target, normalizer - tf.reduce_mean(logits, -1)), gradient

    return compute(logits)
