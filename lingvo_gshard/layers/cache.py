"""Tensors that are written at a place that is known only when the program runs, and made longer."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


def write_at(tensor: tf.Tensor, update: tf.Tensor, place: tf.Tensor, *, axis: int = 1) -> tf.Tensor:
    """`tensor` with `update`, of size n along `axis`, at places `place`, ..., `place` + n - 1.

    Args:
      tensor: any dtype.
      update: the same dtype, and the same dims but for `axis`.
      place: int32 scalar; moved down where place + n would exceed the tensor (XLA's rule).
      axis: of the places.
    """
    start = [0] * axis + [place] + [0] * (tensor.shape.rank - axis - 1)
    return xla.dynamic_update_slice(tensor, update, tf.stack(start))


def lengthened(tensor: tf.Tensor, size: int, *, axis: int = 1) -> tf.Tensor:
    """`tensor` with zeros after its end along `axis`, to `size` in all."""
    shape = tensor.shape.as_list()
    shape[axis] = size - shape[axis]
    return tf.concat([tensor, tf.zeros(shape, tensor.dtype)], axis)
