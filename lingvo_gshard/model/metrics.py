"""Metrics of a batch for TPUEstimatorSpec.eval_metrics, by the names of tf.metrics.

Each is a pair (weighted sum, weight): the estimator adds up both over all batches, and divides.
"""

from __future__ import annotations

from lingvo_gshard.core.late import tf


def mean(values: tf.Tensor, weights: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sum of all values times their weights, and the sum of the weights.

    `weights` have the shape of `values`; None gives every value the weight 1.
    """
    values = tf.cast(values, tf.float32)
    if weights is None:
        return tf.reduce_sum(values), tf.constant(float(values.shape.num_elements()))
    weights = tf.cast(weights, tf.float32)
    return tf.reduce_sum(values * weights), tf.reduce_sum(weights)


def accuracy(
    labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the `mean` of matches between labels and predictions of one shape and dtype."""
    return mean(tf.equal(labels, predictions), weights)
