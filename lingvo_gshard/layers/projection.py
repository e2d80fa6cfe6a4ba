"""Products of rows with weights: one matrix product for all tokens, or one for each expert."""

import math
from collections.abc import Callable

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


def project(x: tf.Tensor, weight: tf.Tensor, num_axes: int = 1) -> tf.Tensor:
    """Contracts x's last dims with the weight's first ones: `BLM,MH->BLH`, or `BLND,NDM->BLM`.

    The float32 weight is cast to the dtype of x; `num_axes` dims are contracted. This is one matrix
    product for all tokens. The gradient of the einsum would contract two dims, B and L, for which
    XLA transposes both operands on a CPU: a tenth of the time of a train step.
    """
    depth = math.prod(weight.shape[:num_axes])
    with tf.name_scope("project"):
        result = matmul(tf.reshape(x, [-1, depth]), tf.reshape(weight, [depth, -1]))
        return tf.reshape(result, [*x.shape[:-num_axes], *weight.shape[num_axes:]])


def matmul(rows: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """rows [..., R, K] times a float32 weight [..., K, N], in the dtype of the rows: [..., R, N].

    The weight's gradient contracts all rows, with one factor transposed: x^T d_y, or (d_y^T x)^T.
    A CPU copies the transposed factor element by element, so it should be the narrower one. That
    makes a train step 4 % faster than always transposing x.
    """
    weight = tf.cast(weight, rows.dtype)
    if weight.shape[-2] <= weight.shape[-1]:
        return tf.matmul(rows, weight)
    return tf.matmul(rows, _transposed(weight), transpose_b=True)


@tf.custom_gradient
def _transposed(weight: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Transposes [..., K, N]; the gradient is computed as [..., N, K] and then transposed back."""

    def gradient(d_transposed: tf.Tensor) -> tf.Tensor:
        # The barrier keeps the compiler from transposing the factors instead.
        (held,) = xla.optimization_barrier(d_transposed)
        return tf.linalg.matrix_transpose(held)

    return tf.linalg.matrix_transpose(weight), gradient
