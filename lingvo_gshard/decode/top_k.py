"""The largest of very many numbers, most of them never sorted."""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gshard.decode import rows

# Below it there is nothing to gain.
_FEW = 512


def top_k(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """tf.math.top_k: values and int32 indices [B, k], the largest first.

    The numbers stand in columns. The k columns with the largest maxima hold the k largest numbers,
    so that a maximum over rows, which goes as fast as memory is read, leaves few to sort. Among
    equal numbers any may be chosen.

    Args:
      x: float32 [B, W], all above the least float32.
      k: how many, at most W.
    """
    batch_size, width = x.shape
    columns = _num_columns(width, k)
    if width < _FEW or columns < k:
        return _sorted(x, k)
    num_rows = -(-width // columns)
    padding = num_rows * columns - width
    grid = tf.pad(x, [[0, 0], [0, padding]], constant_values=x.dtype.min) if padding else x
    grid = tf.reshape(grid, [batch_size, num_rows, columns])
    _, best = _sorted(tf.reduce_max(grid, 1), k)  # [B, k]
    candidates = rows.gathered(grid, best, axis=2)  # [B, num_rows, k]
    values, index = _sorted(tf.reshape(candidates, [batch_size, num_rows * k]), k)
    return values, index // k * columns + rows.picked(best, index % k)


def _sorted(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """top_k of few numbers."""
    if k > 1:
        return tf.math.top_k(x, k)
    index = tf.argmax(x, 1, output_type=tf.int32)
    return tf.reduce_max(x, 1, keepdims=True), index[:, None]


def _num_columns(width: int, k: int) -> int:
    """About sqrt(k * W), which leaves least to sort: 2 * sqrt(k * W); a divisor if one is near."""
    root = math.isqrt(k * width)
    near = [columns for columns in range(root // 2 + 1, 2 * root) if width % columns == 0]
    return min(near, key=lambda columns: abs(columns - root), default=root)
