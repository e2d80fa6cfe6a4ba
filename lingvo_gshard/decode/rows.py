"""Rows chosen by an index that the program finds; each partition of B keeps to its own.

B batch, n rows that there are, k that are chosen, P places, F columns.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap


def reordered(mask: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """mask[b, rows[b, i]]: [B, n, P] and int32 [B, k] give [B, k, P].

    A product with a one-hot matrix, exact on 0/1, that stays local to a partition of B.
    """
    return tf.einsum("BKN,BNP->BKP", tf.one_hot(rows, mask.shape[1], dtype=mask.dtype), mask)


def picked(x: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """x[b, index[b, i]]: finite [B, n] and int32 [B, k] give [B, k]; as reordered."""
    return tf.reduce_sum(tf.one_hot(index, x.shape[1], dtype=x.dtype) * x[:, None], -1)


def gathered(x: tf.Tensor, index: tf.Tensor, *, axis: int = 1) -> tf.Tensor:
    """x[b, ..., index[b, i]] along `axis`, by int32 [B, k], of which there are k then."""
    # A single index of each row would be gathered from all partitions; two are not.
    twice = tf.gather(x, tf.concat([index, index], 1), axis=axis, batch_dims=1)
    return tf.split(twice, 2, axis)[0]


def where(alive: tf.Tensor, new: NestedMap, old: NestedMap) -> NestedMap:
    """Leaf by leaf, `new` for the examples [B] that are alive, `old` for the others."""

    def pick(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.where(tf.reshape(alive, [-1] + [1] * (a.shape.rank - 1)), a, b)

    pairs = zip(new.Flatten(), old.Flatten(), strict=True)
    return new.Pack(pick(a, b) for a, b in pairs)


def column(x: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """x[:, step] of int32 [B, F]; zeros where step is F or more."""
    here = tf.one_hot(step, x.shape[1], dtype=x.dtype)
    return tf.reduce_sum(x * here, 1)
