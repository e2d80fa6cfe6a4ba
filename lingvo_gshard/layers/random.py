"""Random numbers that every partition makes for its own part alone.

TensorFlow's generators number a tensor's elements in ways that the partitioner can't split: each
device would make all of them. Here element i is a hash of (seed, i), computed from an iota that
splits like any other tensor; the numbers are the same for any partitioning.
"""

from __future__ import annotations

import math

import tensorflow as tf

_MOST_INDICES = 2**32


def random_bits(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    """Uniform uint32 of `shape`, a function of seed and index.

    The index goes through murmur3's finalizer twice, keyed by either half of the seed. That is
    sound for dropout and routing, and a third of the cost of a cryptographic generator. Dims
    before those that 32 bits can number move the second key.

    Args:
      shape: at most 2^32 elements in its last dims, and as many in those before.
      seed: int32 [2].

    Raises:
      ValueError: the shape has more elements.
    """
    start = _first_numbered_dim(shape)
    before, last = shape[:start], shape[start:]
    if math.prod(before) > _MOST_INDICES:
        raise ValueError(f"random_bits: {shape} has too many elements for two 32-bit indices.")
    keys = tf.bitcast(seed, tf.uint32)
    high = tf.reshape(_flat_index(before), [*before, *[1] * len(last)])
    mixed = _finalize(_xor(_flat_index(last), _finalize(keys[0] + _uint32(0x9E3779B9))))
    return _finalize(mixed + _finalize(keys[1] + _uint32(0x7F4A7C15) + high))


def random_uniform(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    """Uniform float32 in [0, 1) of `shape`; see random_bits."""
    return tf.cast(_shifted(random_bits(shape, seed), 8), tf.float32) * 2.0**-24


def random_mask(shape: tuple[int, ...], seed: tf.Tensor, share: float) -> tf.Tensor:
    """bool of `shape`, True with probability `share` (0 to 1); see random_bits."""
    threshold = min(round(share * 2**32), 2**32 - 1)
    return random_bits(shape, seed) <= _uint32(threshold)


def _first_numbered_dim(shape: tuple[int, ...]) -> int:
    """From which dim on the elements have indices of 32 bits."""
    for start in range(len(shape)):
        if math.prod(shape[start:]) <= _MOST_INDICES:
            return start
    return len(shape)


def _flat_index(shape: tuple[int, ...]) -> tf.Tensor:
    index, stride = tf.zeros(shape, tf.uint32), 1
    for axis in reversed(range(len(shape))):
        along = [1] * len(shape)
        along[axis] = shape[axis]
        places = tf.cast(tf.range(shape[axis]), tf.uint32) * _uint32(stride)
        index += tf.reshape(places, along)
        stride = stride * shape[axis] % 2**32
    return index


def _finalize(x: tf.Tensor) -> tf.Tensor:
    """murmur3's 32-bit finalizer: a bijection in which every input bit moves every output bit."""
    x = _xor(x, _shifted(x, 16)) * _uint32(0x85EBCA6B)
    x = _xor(x, _shifted(x, 13)) * _uint32(0xC2B2AE35)
    return _xor(x, _shifted(x, 16))


def _xor(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, y)


def _shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(x, _uint32(bits))


def _uint32(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint32)
