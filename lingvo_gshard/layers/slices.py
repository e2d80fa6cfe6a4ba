"""Reads and writes of tensors at an index that is known only when the program runs."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla

Index = Sequence["int | tf.Tensor"]


def read_at(tensor: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    """Returns tensor[start : start + size], for an int32 scalar `start` and a static size."""
    starts = _starts(tensor, start, axis=0)
    return xla.dynamic_slice(tensor, starts, [size, *tensor.shape[1:]])


def read_element(tensor: tf.Tensor, index: Index) -> tf.Tensor:
    """Returns tensor[*index], for integers or int32 scalars: a single slice."""
    shape = list(tensor.shape[len(index) :])
    element = xla.dynamic_slice(tensor, _padded(index, tensor), [1] * len(index) + shape)
    return tf.reshape(element, shape)


def write_element(tensor: tf.Tensor, element: tf.Tensor, index: Index) -> tf.Tensor:
    """Returns `tensor` with `element` at `index`, integers or int32 scalars."""
    update = tf.reshape(element, [1] * len(index) + list(element.shape))
    return xla.dynamic_update_slice(tensor, update, _padded(index, tensor))


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
    return _padded([0] * axis + [start], tensor)


def _padded(index: Index, tensor: tf.Tensor) -> tf.Tensor:
    """Returns `index` with zeros for the other dims of `tensor`."""
    return tf.stack([*index, *[0] * (len(tensor.shape) - len(index))])
