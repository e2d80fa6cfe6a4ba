"""Products of large factors: rows with weights, queries with keys, tokens with one-hot masks.

A CPU with matrix units, a TPU and a GPU multiply bfloat16 numbers several times as fast as float32
ones, and add up the results in float32. So float32 factors may be rounded for their product alone.

R rows, K contracted, N columns. G groups, S tokens of a group, E experts, C capacity, M model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from lingvo_gshard.core.late import tf, xla


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Computes products in the dtype of their first factor, and the gradients likewise.

    If `dtype` is `bfloat16`, float32 factors are rounded to it before they are multiplied, and so
    are those of the gradients. Results and their sums over partitions are float32 all the same.
    """

    dtype: str = "float32"

    def project(self, x: tf.Tensor, weight: tf.Tensor, num_axes: int = 1) -> tf.Tensor:
        """Contracts x's last dims with the weight's first ones: `BLM,MH->BLH`, `BLND,NDM->BLM`.

        `num_axes` dims are contracted. This is one matrix product for all tokens. The gradient of
        the einsum would contract two dims, B and L, for which XLA transposes both operands on a
        CPU: a tenth of the time of a train step.
        """
        depth = math.prod(weight.shape[:num_axes])
        with tf.name_scope("project"):
            rows = tf.reshape(x, [-1, depth])
            result = self.matmul_weight(rows, tf.reshape(weight, [depth, -1]))
            return tf.reshape(result, [*x.shape[:-num_axes], *weight.shape[num_axes:]])

    def matmul_weight(self, rows: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """rows [..., R, K] times a float32 weight [..., K, N]: [..., R, N].

        The weight's gradient contracts all rows, with one factor transposed: x^T d_y, or
        (d_y^T x)^T. A CPU copies the transposed factor element by element, so it should be the
        narrower one. That makes a train step 4 % faster than always transposing x.
        """
        if self._rounds(rows):
            return _rounded(rows, weight)
        weight = tf.cast(weight, rows.dtype)
        if weight.shape[-2] <= weight.shape[-1]:
            return tf.matmul(rows, weight)
        return tf.matmul(rows, tf.custom_gradient(_transposed)(weight), transpose_b=True)

    def matmul(
        self, a: tf.Tensor, b: tf.Tensor, name: str, *, transpose_b: bool = False
    ) -> tf.Tensor:
        """a [..., R, K] times b [..., K, N], or [..., N, K] with `transpose_b`: [..., R, N]."""
        if not self._rounds(a):
            return tf.matmul(a, b, transpose_b=transpose_b, name=name)
        with tf.name_scope(name):
            return _rounded(a, b, transpose_b=transpose_b)

    def dispatch(self, mask_GSEC: tf.Tensor, x_GSM: tf.Tensor) -> tf.Tensor:
        """Sums the tokens of each group by a mask, group by group: [E, G, C, M]."""
        if not self._rounds(x_GSM):
            return tf.einsum("GSEC,GSM->EGCM", mask_GSEC, x_GSM, name="dispatch")
        (count, size, *buffers), dim = mask_GSEC.shape, x_GSM.shape[-1]
        with tf.name_scope("dispatch"):
            mask = tf.reshape(mask_GSEC, [count, size, -1])
            x_GECM = tf.reshape(_rounded(mask, x_GSM, transpose_a=True), [count, *buffers, dim])
            return tf.transpose(x_GECM, [1, 0, 2, 3])

    def combine(self, weights_GSEC: tf.Tensor, y_GECM: tf.Tensor) -> tf.Tensor:
        """Sums the experts' outputs of each group by the weights: [G, S, M]."""
        if not self._rounds(y_GECM):
            return tf.einsum("GSEC,GECM->GSM", weights_GSEC, y_GECM, name="combine")
        (count, size, *_), dim = weights_GSEC.shape, y_GECM.shape[-1]
        with tf.name_scope("combine"):
            weights = tf.reshape(weights_GSEC, [count, size, -1])
            return _rounded(weights, tf.reshape(y_GECM, [count, -1, dim]))

    def _rounds(self, factor: tf.Tensor) -> bool:
        return self.dtype == "bfloat16" and factor.dtype == tf.float32


FLOAT32 = Arithmetic()


def _rounded(
    a: tf.Tensor, b: tf.Tensor, *, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
    """The product of a [..., R, K] and b [..., K, N] in bfloat16; [..., R, N], float32."""

    @tf.custom_gradient
    def product(*wide: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        a, b = (tf.cast(factor, tf.bfloat16) for factor in wide)

        def gradient(d_wide: tf.Tensor) -> list[tf.Tensor]:
            d = tf.cast(d_wide, tf.bfloat16)
            if transpose_a:
                return [dot(b, d, transpose_b=True), dot(a, d)]
            if transpose_b:
                return [dot(d, b), _columns_times(d, a)]
            return [dot(d, b, transpose_b=True), _columns_times(a, d)]

        return dot(moved(a) if transpose_a else a, b, transpose_b=transpose_b), gradient

    return product(a, b)


def _columns_times(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """a^T b of a [..., R, K] and b [..., R, N]; the narrower one is transposed."""
    if a.shape[-1] <= b.shape[-1]:
        return dot(moved(a), b)
    return moved(dot(moved(b), a))


def dot(a: tf.Tensor, b: tf.Tensor, *, transpose_b: bool = False) -> tf.Tensor:
    """bfloat16 [..., R, K] times [..., K, N], or [..., N, K] to transpose: float32 [..., R, N]."""
    return tf.raw_ops.BatchMatMulV3(x=a, y=b, adj_y=transpose_b, Tout=tf.float32)


def moved(x: tf.Tensor) -> tf.Tensor:
    """[..., R, K] as [..., K, R], before the product that takes it.

    A plain transpose would become part of the product. XLA's CPU compiler then finds that its
    library can't do it, and multiplies in float32 after all.
    """
    *batch, rows, columns = x.shape
    if columns % 2:
        return tf.linalg.matrix_transpose(x)
    k = len(batch)
    pairs = tf.reshape(x, [*batch, rows, columns // 2, 2])
    return tf.reshape(tf.transpose(pairs, [*range(k), k + 1, k + 2, k]), [*batch, columns, rows])


def _transposed(weight: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Transposes [..., K, N]; the gradient is computed as [..., N, K] and then transposed back."""

    def gradient(d_transposed: tf.Tensor) -> tf.Tensor:
        # The barrier keeps the compiler from transposing the factors instead.
        (held,) = xla.optimization_barrier(d_transposed)
        return tf.linalg.matrix_transpose(held)

    return tf.linalg.matrix_transpose(weight), gradient
