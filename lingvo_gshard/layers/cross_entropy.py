"""Cross entropy over a vocabulary. B batch, L length, V vocabulary."""

import tensorflow as tf


def cross_entropies(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Cross entropy of softmax(logits) with the labels, and with the uniform distribution.

    The loss with label smoothing e is (1 - e) times the first plus e times the second.

    Args:
      logits: float32 [B, L, V].
      labels: int32 [B, L].

    Returns:
      Two float32 tensors [B, L], in nats.
    """

    # TensorFlow's own gradient would keep three more [B, L, V] tensors in memory.
    @tf.custom_gradient
    def compute(logits: tf.Tensor):
        normalizer = tf.reduce_logsumexp(logits, -1)
        target = tf.reduce_sum(tf.where(_is_label(logits, labels), logits, 0.0), -1)

        def gradient(d_label: tf.Tensor, d_uniform: tf.Tensor) -> tf.Tensor:
            probability = tf.exp(logits - normalizer[..., None])
            both = (d_label + d_uniform)[..., None] * probability
            at_label = tf.where(_is_label(logits, labels), d_label[..., None], 0.0)
            return both - at_label - d_uniform[..., None] / logits.shape[-1]

        return (normalizer - target, normalizer - tf.reduce_mean(logits, -1)), gradient

    return compute(logits)


def _is_label(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return labels[..., None] == tf.range(logits.shape[-1])
