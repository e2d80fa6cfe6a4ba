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
    if mask.shape[1] == 1:  # Greedy decoding: there is nothing to select from.
        return tf.tile(mask, [1, rows.shape[1], 1])
    return tf.einsum("BKN,BNP->BKP", tf.one_hot(rows, mask.shape[1], dtype=mask.dtype), mask)


def picked(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns x[b, index[b, i]]: [B, k] from finite [B, n] and int32 [B, k], like `reordered`."""
    if x.shape[1] == 1:
        return tf.tile(x, [1, index.shape[1]])
    return tf.reduce_sum(tf.one_hot(index, x.shape[1], dtype=x.dtype) * x[:, None], -1)


def gathered(x: tf.Tensor, index: tf.Tensor, *, axis: int = 1) -> tf.Tensor:
    """Returns x[b, ..., index[b, i]] along `axis`, which then has size k, for int32 [B, k]."""
    # XLA gathers a single index per row from all partitions, but not two of them.
    twice = tf.gather(x, tf.concat([index, index], 1), axis=axis, batch_dims=1)
    return tf.split(twice, 2, axis)[0]


def where(condition: tf.Tensor, new: NestedMap, old: NestedMap) -> NestedMap:
    """Returns the examples of `new` where bool [B] is true, and the examples of `old` elsewhere."""

    def chosen(new_leaf: tf.Tensor, old_leaf: tf.Tensor) -> tf.Tensor:
        # [B, 1, ..., 1], which broadcasts against the leaves.
        per_example = tf.reshape(condition, [-1] + [1] * (new_leaf.shape.rank - 1))
        return tf.where(per_example, new_leaf, old_leaf)

    return new.Transform(chosen, old)


def top_k(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the values and int32 indices [B, k] of the k <= W largest numbers, as tf.math.top_k.

    The numbers are float32 [B, W], all above the lowest float32. Equal numbers come in any order.

    The numbers are arranged in columns. The k columns with the largest maxima contain the k largest
    numbers: a number in any other column is at most that column's maximum, and so at most the
    maximum of each of the k. A maximum over rows, which runs at the speed of memory, thus leaves
    few numbers to sort.
    """
    batch_size, width = x.shape
    num_columns = _num_columns(width, k)
    if width < _MIN_WIDTH or num_columns < k:
        return _sorted(x, k)

    # [B, W] -> [B, num_rows, num_columns]; the padding is below every number.
    num_rows = -(-width // num_columns)
    padding = num_rows * num_columns - width
    if padding:
        x = tf.pad(x, [[0, 0], [0, padding]], constant_values=x.dtype.min)
    grid = tf.reshape(x, [batch_size, num_rows, num_columns])

    # The k columns that contain the k largest numbers.
    _, best_columns = _sorted(tf.reduce_max(grid, 1), k)  # [B, k]
    candidates = gathered(grid, best_columns, axis=2)  # [B, num_rows, k]
    values, index = _sorted(tf.reshape(candidates, [batch_size, num_rows * k]), k)

    # A candidate's index is row * k + i, where i counts the best columns.
    return values, index // k * num_columns + picked(best_columns, index % k)


def _sorted(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the k largest of [B, W] and their indices, by sorting unless k is 1."""
    if k > 1:
        return tf.math.top_k(x, k)

    index = tf.argmax(x, 1, output_type=tf.int32)
    return tf.reduce_max(x, 1, keepdims=True), index[:, None]


def _num_columns(width: int, k: int) -> int:
    """Returns the number of columns that leaves the least to sort, about sqrt(k * W).

    With C columns, C maxima and k * W / C candidates are sorted; the sum is least at sqrt(k * W).
    If a divisor of W is near, it is returned, so that the grid is not padded.
    """
    root = math.isqrt(k * width)
    near = range(root // 2 + 1, 2 * root)  # The sum there is at most a quarter above the least.
    divisors = [columns for columns in near if width % columns == 0]
    return min(divisors, key=lambda columns: abs(columns - root), default=root)
