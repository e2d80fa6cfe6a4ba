"""Writing into a tensor at a place that is known only when the program runs."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


def write_at(tensor: tf.Tensor, update: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """`tensor` [B, P, ...] with `update` [B, n, ...] at places `place`, ..., `place` + n - 1.

    Args:
      tensor: any dtype.
      update: the same dtype and trailing dims.
      place: int32 scalar; moved down where place + n would exceed P (XLA's rule).
    """
    start = [0, place] + [0] * (tensor.shape.rank - 2)
    return xla.dynamic_update_slice(tensor, update, tf.stack(start))
