"""The model's ends: embedding and cross entropy. B batch, L length, M model, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, Use, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.weight import Weight

# The longest wavelength of the sinusoids, over 2 pi.
_MAX_TIMESCALE = 10000.0


class EmbeddingLayer(BaseLayer):
    """Rows of a [V, M] table, scaled by sqrt(M), plus sinusoids of the positions.

    The paper does not mention positions; these are the original Transformer's (Vaswani et al. 2017,
    3.4 and 3.5), with all sines before all cosines.

    A model whose attention knows the positions does not need sinusoids.
    """

    class Params(BaseLayer.Params):
        vocab_size: int = setting(REQUIRED, "V, the number of pieces.")
        dim: int = setting(REQUIRED, "M, the model dimension, which must be even.")
        scaled: bool = setting(True, "Whether rows are multiplied by sqrt(M).")
        sinusoids: bool = setting(True, "Whether sinusoids of the positions are added.")
        first_position: int = setting(0, "The position whose sinusoid a text's first token gets.")

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        self._check_setting("dim", p.dim % 2 == 0, "even")
        table = gaussian((p.vocab_size, p.dim), "VM", fan_in=p.dim, use=Use.TABLE)
        self.CreateVariable("table", table)

    def FProp(
        self, theta: NestedMap, ids: tf.Tensor, positions: tf.Tensor, context: Context
    ) -> tf.Tensor:
        """Embeds ids at positions, both int32 [B, L]; returns [B, L, M].

        If all ids have one position, positions may be [1, 1].
        """
        # A lookup, where a one-hot product would take V times as many flops.
        rows_BLM = Weight.of(theta.table).rows(ids)
        rows_BLM = context.numerics.lookup("BLV,VM->BLM", rows_BLM, V=self.p.vocab_size)
        rows_BLM = self.annotate(rows_BLM, "BLM")
        if self.p.scaled:
            rows_BLM *= math.sqrt(self.p.dim)
        if self.p.sinusoids:
            if self.p.first_position:
                positions += self.p.first_position
            rows_BLM += sinusoids(positions, self.p.dim)
        return rows_BLM


def sinusoids(positions: tf.Tensor, dim: int) -> tf.Tensor:
    """Returns the sines, then the cosines, of int32 positions [...]: [..., dim].

    The wavelengths are a geometric series from 2 pi to 20000 pi.
    """
    num_rates = dim // 2
    last = max(1, num_rates - 1)  # A single rate is 1.
    rates = tf.constant([_MAX_TIMESCALE ** (-i / last) for i in range(num_rates)], tf.float32)

    angles = tf.cast(positions, tf.float32)[..., None] * rates
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


def capped(logits: tf.Tensor, cap: float | None) -> tf.Tensor:
    """Returns logits whose absolute values stay below `cap`: cap * tanh(logits / cap)."""
    return logits if cap is None else cap * tf.tanh(logits / cap)


def check_cap(name: str, cap: float | None) -> None:
    """Raises ValueError unless a cap, called `name`, is None or above 0."""
    if cap is not None and cap <= 0:
        raise ValueError(f"{name} must be above 0 or None, got {cap}.")


def cross_entropies(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns softmax(logits)'s cross entropy with the labels, and with the uniform distribution.

    The third result is log sum_v exp z_v, whose square is the softmax's z-loss. `logits` are
    float32 [B, L, V], `labels` int32 [B, L], and all results float32 [B, L], in nats. The loss with
    label smoothing e is (1 - e) times the first plus e times the second.
    """

    # TensorFlow's own gradient would keep three more [B, L, V] tensors in memory.
    @tf.custom_gradient
    def compute(
        logits: tf.Tensor,
    ) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        # -log softmax(z)_v is log sum exp z - z_v.
        normalizer_BL = tf.reduce_logsumexp(logits, -1)
        label_logit_BL = tf.gather(logits, labels, batch_dims=2)

        def gradient(
            d_label: tf.Tensor, d_uniform: tf.Tensor, d_normalizer: tf.Tensor
        ) -> tf.Tensor:
            # The gradient of a cross entropy is softmax(z) minus the target distribution.
            probability_BLV = tf.exp(logits - normalizer_BL[..., None])
            towards_both = (d_label + d_uniform + d_normalizer)[..., None] * probability_BLV
            is_label_BLV = labels[..., None] == tf.range(logits.shape[-1])
            at_label = tf.where(is_label_BLV, d_label[..., None], 0.0)
            return towards_both - at_label - d_uniform[..., None] / logits.shape[-1]

        with_label_BL = normalizer_BL - label_logit_BL
        with_uniform_BL = normalizer_BL - tf.reduce_mean(logits, -1)
        return (with_label_BL, with_uniform_BL, normalizer_BL), gradient

    return compute(logits)
