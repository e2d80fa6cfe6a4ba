"""Weights applied to rows: one matrix product of all tokens, or one of each expert's."""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


def project(x: tf.Tensor, weight: tf.Tensor, num_axes: int = 1) -> tf.Tensor:
    """x's last dims times the weight's first ones: `BLM,MH->BLH`, or `BLND,NDM->BLM` with two.

    One matrix product of all tokens. The gradient of such an einsum would be a product over two
    dims, B and L; for that XLA transposes both its operands on a CPU, a tenth of a train step.

    Args:
      x: float [..., the contracted dims].
      weight: float32 [the contracted dims, ...], cast to x's dtype.
      num_axes: how many dims are contracted.
    """
    depth = math.prod(weight.shape[:num_axes])
    with tf.name_scope("project"):
        result = matmul(tf.reshape(x, [-1, depth]), tf.reshape(weight, [depth, -1]))
        return tf.reshape(result, [*x.shape[:-num_axes], *weight.shape[num_axes:]])


def matmul(rows: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """rows [..., R, K] times a float32 weight [..., K, N], in the dtype of the rows: [..., R, N].

    The weight's gradient is a product of all rows, one factor turned: x^T d_y, or (d_y^T x)^T. A
    CPU copies what is turned, element by element, so it is the narrower of the two: 4 % less of a
    train step than with x alone.
    """
    weight = tf.cast(weight, rows.dtype)
    if weight.shape[-2] <= weight.shape[-1]:
        return tf.matmul(rows, weight)
    return tf.matmul(rows, _turned(weight), transpose_b=True)


@tf.custom_gradient
def _turned(weight: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """[..., K, N] as [..., N, K]; its gradient is computed like that, and turned back after."""

    def gradient(d_turned: tf.Tensor) -> tf.Tensor:
        # Without it the compiler would turn the factors instead.
        (held,) = xla.optimization_barrier(d_turned)
        return tf.linalg.matrix_transpose(held)

    return tf.linalg.matrix_transpose(weight), gradient
