"""Selecting rows and numbers by indices that the program computes.

Partitioned along B, all of these work without communication.

B batch, n rows to select from, k selected rows, P places, W numbers.
"""

from __future__ import annotations

import math

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap

# With fewer numbers, sorting all of them is as fast.
_MIN_WIDTH = 512


def reordered(mask: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns mask[b, rows[b, i]]: [B, k, P] from [B, n, P] and int32 [B, k].

    A product with a one-hot matrix: exact for 0/1, and local to a partition of B.
    """
    return tf.einsum("BKN,BNP->BKP", tf.one_hot(rows, mask.shape[1], dtype=mask.dtype), mask)


def picked(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns x[b, index[b, i]]: [B, k] from finite [B, n] and int32 [B, k], as `reordered`."""
    return tf.reduce_sum(tf.one_hot(index, x.shape[1], dtype=x.dtype) * x[:, None], -1)


def gathered(x: tf.Tensor, index: tf.Tensor, *, axis: int = 1) -> tf.Tensor:
    """Returns x[b, ..., index[b, i]] along `axis`, which then has size k, for int32 [B, k]."""
    # XLA gathers a single index per row from all partitions, but not two of them.
    twice = tf.gather(x, tf.concat([index, index], 1), axis=axis, batch_dims=1)
    return tf.split(twice, 2, axis)[0]


def where(condition: tf.Tensor, new: NestedMap, old: NestedMap) -> NestedMap:
    """Takes the examples where bool [B] is true from `new` and the others from `old`."""

    def chosen(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.reshape(condition, [-1] + [1] * (a.shape.rank - 1)), a, b)

    return new.Transform(chosen, old)


def top_k(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the values and int32 indices [B, k] of the k <= W largest numbers, as tf.math.top_k.

    The numbers, float32 [B, W] and all above the lowest float32, are arranged in columns. The k
    columns with the largest maxima contain the k largest numbers. So a maximum over rows, which
    runs at the speed of memory, leaves few numbers to sort. Equal numbers come in any order.
    """
    batch_size, width = x.shape
    columns = _num_columns(width, k)
    if width < _MIN_WIDTH or columns < k:
        return _sorted(x, k)
    num_rows = -(-width // columns)
    padding = num_rows * columns - width
    grid = tf.pad(x, [[0, 0], [0, padding]], constant_values=x.dtype.min) if padding else x
    grid = tf.reshape(grid, [batch_size, num_rows, columns])
    _, best = _sorted(tf.reduce_max(grid, 1), k)  # [B, k]
    candidates = gathered(grid, best, axis=2)  # [B, num_rows, k]
    values, index = _sorted(tf.reshape(candidates, [batch_size, num_rows * k]), k)
    return values, index // k * columns + picked(best, index % k)


def _sorted(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    if k > 1:
        return tf.math.top_k(x, k)
    index = tf.argmax(x, 1, output_type=tf.int32)
    return tf.reduce_max(x, 1, keepdims=True), index[:, None]


def _num_columns(width: int, k: int) -> int:
    """Returns about sqrt(k * W), which leaves the least to sort; a divisor of W if one is near."""
    root = math.isqrt(k * width)
    near = [columns for columns in range(root // 2 + 1, 2 * root) if width % columns == 0]
    return min(near, key=lambda columns: abs(columns - root), default=root)
