"""Random numbers of which each partition computes only its own part.

The partitioner can't split TensorFlow's generators: each device would compute all numbers. Here
element i is a hash of (seed, i), the same for any partitioning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from lingvo_gshard.core.late import tf

_MAX_INDICES = 2**32


def random_bits(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    """Uniform uint32 numbers of `shape`, each a function of the seed and its index.

    The index goes through murmur3's finalizer twice, keyed by one half of the seed each time. That
    is good enough for dropout, at a third of the cost of a cryptographic generator. The index
    counts as many last dims as fit 32 bits; the hash of that of the dims before is XORed to the
    second key's. The seed is int32 [2]. Raises ValueError if both are of more than 2^32 elements.
    """
    return _traced()(shape, seed)


@functools.cache
def _traced() -> Callable[[tuple[int, ...], tf.Tensor], tf.Tensor]:
    """A function that is traced once for each shape, as a model draws many masks of one shape."""
    return tf.function(_random_bits, autograph=False)


def _random_bits(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    sizes = [math.prod(shape[start:]) for start in range(len(shape) + 1)]
    start = next(start for start, size in enumerate(sizes) if size <= _MAX_INDICES)
    before, last = shape[:start], shape[start:]
    if math.prod(before) > _MAX_INDICES:
        raise ValueError(f"random_bits: {shape} has too many elements for two 32-bit indices.")
    keys = tf.cast(seed, tf.uint32)  # Negative numbers wrap around.
    high = tf.reshape(_flat_index(before), [*before, *[1] * len(last)])
    mixed = _finalize(_flat_index(last) ^ _finalize(keys[0] + 0x9E3779B9))
    return _finalize(mixed + (_finalize(keys[1] + 0x7F4A7C15) ^ _finalize(high)))


def random_uniform(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    """Uniform float32 numbers in [0, 1) of `shape`; see random_bits."""
    bits = tf.bitwise.right_shift(random_bits(shape, seed), 8)
    return tf.cast(bits, tf.float32) * 2.0**-24


def random_mask(shape: tuple[int, ...], seed: tf.Tensor, share: float) -> tf.Tensor:
    """bool of `shape`, True with probability `share`, in [0, 1]; see random_bits."""
    return random_bits(shape, seed) <= min(round(share * 2**32), 2**32 - 1)


def _flat_index(shape: tuple[int, ...]) -> tf.Tensor:
    index, stride = tf.zeros(shape, tf.uint32), 1
    for axis in reversed(range(len(shape))):
        indices = tf.cast(tf.range(shape[axis]), tf.uint32) * stride
        index += tf.reshape(indices, [n if i == axis else 1 for i, n in enumerate(shape)])
        stride = stride * shape[axis] % 2**32
    return index


def _finalize(x: tf.Tensor) -> tf.Tensor:
    """murmur3's 32-bit finalizer: a bijection in which each input bit affects all output bits."""
    x = (x ^ tf.bitwise.right_shift(x, 16)) * 0x85EBCA6B
    x = (x ^ tf.bitwise.right_shift(x, 13)) * 0xC2B2AE35
    return x ^ tf.bitwise.right_shift(x, 16)
