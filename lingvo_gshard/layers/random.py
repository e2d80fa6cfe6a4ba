"""Random numbers that each partition computes for its own part of a tensor.

The partitioner can't split TensorFlow's generators: each device would compute all numbers. Here
element i is a hash of (seed, i), the same for any partitioning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from lingvo_gshard.core.late import tf

_MAX_INDICES = 2**32

# Added to the two halves of a seed, so that the same number in both gives different keys.
_FIRST_SALT = 0x9E3779B9
_SECOND_SALT = 0x7F4A7C15


def random_bits(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    """Returns uniform uint32 numbers of `shape`, each a function of the seed and its index.

    The index goes through murmur3's finalizer twice, and each time a key from one half of the seed
    is mixed in. That is good enough for dropout, at a third of the cost of a cryptographic
    generator. In a tensor of more than 2^32 elements the index has two parts, for the leading and
    for the trailing dims, and the leading part is mixed into the second key.

    Args:
      shape: Static.
      seed: int32 [2]; or [B, 2], one for each part of the first dim, which then has the numbers of
        a tensor of shape[1:] with this seed.

    Raises:
      ValueError: if one part of the index would need more than 32 bits.
    """
    return _traced_random_bits()(shape, seed)


@functools.cache
def _traced_random_bits() -> Callable[[tuple[int, ...], tf.Tensor], tf.Tensor]:
    """Returns a function that is traced once a shape, as a model draws many masks of one shape."""
    return tf.function(_random_bits, autograph=False)


def _random_bits(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    keys = tf.cast(seed, tf.uint32)  # Negative numbers wrap around.
    first_key = keys[..., 0]
    second_key = keys[..., 1]
    if seed.shape.rank == 2:
        shape = shape[1:]
        of_rows = [-1, *[1] * len(shape)]
        first_key = tf.reshape(first_key, of_rows)
        second_key = tf.reshape(second_key, of_rows)

    num_leading = _num_leading_dims(shape)
    leading = shape[:num_leading]
    trailing = shape[num_leading:]
    if math.prod(leading) > _MAX_INDICES:
        raise ValueError(f"random_bits: {shape} has too many elements for two 32-bit indices.")

    leading_index = tf.reshape(_flat_index(leading), [*leading, *[1] * len(trailing)])
    once_mixed = _finalize(_flat_index(trailing) ^ _finalize(first_key + _FIRST_SALT))
    last_key = _finalize(second_key + _SECOND_SALT) ^ _finalize(leading_index)
    return _finalize(once_mixed + last_key)


def _num_leading_dims(shape: tuple[int, ...]) -> int:
    """Returns the smallest number of leading dims without which the index fits 32 bits."""
    count = 0
    while math.prod(shape[count:]) > _MAX_INDICES:
        count += 1
    return count


def random_uniform(shape: tuple[int, ...], seed: tf.Tensor) -> tf.Tensor:
    """Returns uniform float32 numbers in [0, 1) of `shape`; see random_bits."""
    # As many bits as a float32 holds exactly: with more, the largest would be rounded up to 1.
    bits = tf.bitwise.right_shift(random_bits(shape, seed), 8)
    return tf.cast(bits, tf.float32) * 2.0**-24


def random_mask(shape: tuple[int, ...], seed: tf.Tensor, share: float) -> tf.Tensor:
    """Returns bool of `shape`, True with probability `share`, in [0, 1]; see random_bits."""
    threshold = min(round(share * 2**32), 2**32 - 1)
    return random_bits(shape, seed) <= threshold


def _flat_index(shape: tuple[int, ...]) -> tf.Tensor:
    """Returns uint32 numbers 0, 1, 2, ... of `shape`, in row-major order.

    It is a sum of ranges along each dim, and a partition needs only its own part of each.
    """
    index = tf.zeros(shape, tf.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        along_axis = [1] * len(shape)
        along_axis[axis] = shape[axis]
        index += tf.reshape(tf.cast(tf.range(shape[axis]), tf.uint32) * stride, along_axis)
        stride = stride * shape[axis] % 2**32
    return index


def _finalize(x: tf.Tensor) -> tf.Tensor:
    """murmur3's 32-bit finalizer: a bijection in which each input bit affects all output bits."""
    x = (x ^ tf.bitwise.right_shift(x, 16)) * 0x85EBCA6B
    x = (x ^ tf.bitwise.right_shift(x, 13)) * 0xC2B2AE35
    return x ^ tf.bitwise.right_shift(x, 16)
