"""The largest of very many numbers, most of them never sorted."""

from __future__ import annotations

import math

import tensorflow as tf

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
    if k == 1:
        index = tf.argmax(x, 1, output_type=tf.int32)
        return tf.reduce_max(x, 1, keepdims=True), index[:, None]
    batch_size, width = x.shape
    columns = _num_columns(width, k)
    if width < _FEW or columns < k:
        return tf.math.top_k(x, k)
    rows = -(-width // columns)
    padding = rows * columns - width
    grid = tf.pad(x, [[0, 0], [0, padding]], constant_values=x.dtype.min) if padding else x
    grid = tf.reshape(grid, [batch_size, rows, columns])
    _, best = tf.math.top_k(tf.reduce_max(grid, 1), k)  # [B, k]
    candidates = tf.gather(grid, best, axis=2, batch_dims=1)  # [B, rows, k]
    values, index = tf.math.top_k(tf.reshape(candidates, [batch_size, rows * k]), k)
    return values, index // k * columns + tf.gather(best, index % k, batch_dims=1)


def _num_columns(width: int, k: int) -> int:
    """About sqrt(k * W), which leaves least to sort: 2 * sqrt(k * W); a divisor if one is near."""
    root = math.isqrt(k * width)
    near = [columns for columns in range(root // 2 + 1, 2 * root) if width % columns == 0]
    return min(near, key=lambda columns: abs(columns - root), default=root)
