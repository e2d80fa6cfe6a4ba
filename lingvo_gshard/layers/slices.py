"""Reads and writes of tensors at an index that is known only when the program runs."""

from __future__ import annotations

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla


def read_at(tensor: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    """Returns tensor[start : start + size], for an int32 scalar `start` and a static size."""
    starts = _starts(tensor, start, axis=0)
    return xla.dynamic_slice(tensor, starts, [size, *tensor.shape[1:]])


def write_at(tensor: tf.Tensor, update: tf.Tensor, start: tf.Tensor, *, axis: int = 1) -> tf.Tensor:
    """Returns `tensor` with `update` written over the indices from `start` on, along `axis`.

    `update` has the same dtype and, except along `axis`, the same shape. Where it would reach
    beyond the tensor's end, XLA moves `start`, an int32 scalar, back so that it fits.
    """
    return xla.dynamic_update_slice(tensor, update, _starts(tensor, start, axis))


def lengthened(tensor: tf.Tensor, size: int, *, axis: int = 1) -> tf.Tensor:
    """Returns `tensor` with zeros at the end of `axis`, which then has `size` elements."""
    padding_shape = tensor.shape.as_list()
    padding_shape[axis] = size - padding_shape[axis]
    return tf.concat([tensor, tf.zeros(padding_shape, tensor.dtype)], axis)


def _starts(tensor: tf.Tensor, start: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the first index of a slice in each dim: `start` along `axis`, 0 along others."""
    starts: list[tf.Tensor | int] = [0] * len(tensor.shape)
    starts[axis] = start
    return tf.stack(starts)
