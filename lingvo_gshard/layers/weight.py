"""A weight as products read it: whole, in fewer bits, or one of a loop's stack.

K contracted, N columns, R rows, V vocabulary, M model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla

# A product of at most this many rows has the weight as its left factor. At each call XLA's library
# for CPUs copies the right factor into the order in which it multiplies, and reads the left one in
# place. With more rows the copy is a small part of the work, and wide right factors are multiplied
# faster. Without matrix units a CPU multiplies bfloat16 so from few rows on.
_MAX_LEFT_ROWS = {"float32": 128, "bfloat16": 16, "int8": 64}

# The largest int8 that has a negative: the numbers are symmetric around 0.
_MAX_INT8 = 127.0
# Below any number that matters, and above zero: the largest number of a row of zeros.
_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight's numbers, and their index if they are part of a stack that is not read yet."""

    # A factor [..., K, N], whose rows K are contracted. Laid out for products of few rows it is
    # [..., N, K], in float32, bfloat16 or int8. A table [V, M] is laid out as it is.
    tensor: tf.Tensor
    is_laid_out: bool = False
    scales: tf.Tensor | None = None  # float32 [..., N], for int8: the weight is scales * tensor.
    # If set, the tensors are stacks [R, ...], and the weight is this element of them. Experts read
    # a part of it, so that the rest is not copied.
    index: int | None = None

    @classmethod
    def of(cls, theta: Theta) -> Weight:
        """Returns a weight in theta, where a decoder has a NestedMap: see stored_weights.py."""
        if isinstance(theta, Weight):
            return theta
        if isinstance(theta, NestedMap):
            return cls(theta.kept, is_laid_out=True, scales=theta.get("scales"))
        return cls(theta)

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The numbers and, for int8, their scales."""
        return [self.tensor] if self.scales is None else [self.tensor, self.scales]

    @property
    def shape(self) -> list[int]:
        """The static shape of the numbers, without the stack."""
        sizes = list(self.tensor.shape)
        return sizes if self.index is None else sizes[1:]

    @property
    def stacks(self) -> list[tf.Tensor]:
        """The tensors as stacks [R, ...]; R is 1 for a weight that is not part of one."""
        if self.index is not None:
            return self.tensors
        return [tensor[None] for tensor in self.tensors]

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> Weight:
        """Returns a weight of the same kind, not part of a stack, with other tensors."""
        tensor, *scales = tensors
        return Weight(tensor, self.is_laid_out, scales[0] if scales else None)

    def at(self, index: int) -> Weight:
        """Returns the element at an index of a weight that is a stack, without reading it."""
        return dataclasses.replace(self, index=index)

    def read(self) -> Weight:
        """Returns the weight without the stack that it is part of."""
        if self.index is None:
            return self
        return self.with_tensors([tensor[self.index] for tensor in self.tensors])

    def as_matrix(self, depth: int) -> Weight:
        """Returns a factor [K..., N...] as a matrix of `depth` rows."""
        if not self.is_laid_out:
            return Weight(tf.reshape(self.tensor, [depth, -1]))
        matrices = [tf.reshape(self.tensor, [-1, depth])]
        if self.scales is not None:
            matrices.append(tf.reshape(self.scales, [-1]))
        return self.with_tensors(matrices)

    def transposed(self) -> Weight:
        """Returns a table [V, M] as a factor, for products that contract M."""
        return self if self.is_laid_out else Weight(tf.transpose(self.tensor))

    def rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows of a table [V, M] at int32 ids [...], in float32: [..., M]."""
        rows = tf.cast(tf.gather(self.tensor, ids), tf.float32)
        if self.scales is None:
            return rows
        return rows * tf.gather(self.scales, ids)[..., None]

    def product(self, x: tf.Tensor) -> tf.Tensor:
        """Returns x [..., R, K] times a factor that is laid out: [..., R, N], in x's dtype.

        x is rounded to the weight's numbers, to int8 with a scale for each row of x. Products of
        int8 are summed exactly, others in float32.
        """
        if self.scales is None:
            sums = _dot(tf.cast(x, self.tensor.dtype), self.tensor, tf.float32)
            return tf.cast(sums, x.dtype)

        # (scales_x * x) (scales_w * w) = scales_x * scales_w * (x w), whose sums are int32.
        rounded, x_scales = quantized(tf.cast(x, tf.float32))
        sums = tf.cast(_dot(rounded, self.tensor, tf.int32), tf.float32)
        return tf.cast(sums * x_scales[..., None] * self.scales[..., None, :], x.dtype)


# A weight in theta: float32 numbers as they were trained; a decoder's NestedMap of `kept` numbers
# and perhaps their `scales`; or an element of a stack.
Theta: TypeAlias = "tf.Tensor | NestedMap | Weight"


def weights_of_layer(stacks: NestedMap, index: int, stay: NestedMap) -> NestedMap:
    """Returns the weights of one layer, given a tree of stacks and, for each, whether it stays.

    A weight that stays is a Weight, which is read where it is used.
    """
    if isinstance(stay, bool):
        element = Weight.of(stacks).at(index)
        if stay:
            return element
        # Layers read trained numbers, such as the scales of norms, as plain tensors.
        element = element.read()
        return element if element.is_laid_out else element.tensor
    if isinstance(stay, list):
        return [
            weights_of_layer(stack, index, own) for stack, own in zip(stacks, stay, strict=True)
        ]
    return NestedMap(
        {name: weights_of_layer(stacks[name], index, own) for name, own in stay.items()}
    )


def quantized(x: tf.Tensor, num_contracted: int = 1) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns int8 numbers, and float32 scales without the last dims, whose product is about x.

    The largest element of the last dims is 127 or -127; the others are rounded to the nearest.
    """
    last = list(range(len(x.shape) - num_contracted, len(x.shape)))
    largest = tf.reduce_max(tf.abs(x), last, keepdims=True)
    scales = tf.maximum(largest, _TINY) / _MAX_INT8
    rounded = tf.cast(tf.round(x / scales), tf.int8)
    return rounded, tf.squeeze(scales, last)


def _dot(x: tf.Tensor, weight: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns x [..., R, K] times the transpose of weight [..., N, K]: [..., R, N] in `dtype`."""
    num_rows = x.shape[-2]
    if num_rows > _MAX_LEFT_ROWS[weight.dtype.name]:
        return tf.raw_ops.BatchMatMulV3(x=x, y=weight, adj_y=True, Tout=dtype)

    # An int8 product with a single column takes three times as long as one with two.
    if num_rows == 1 and weight.dtype == tf.int8:
        x = tf.concat([x, x], -2)
    columns = tf.raw_ops.BatchMatMulV3(x=weight, y=x, adj_y=True, Tout=dtype)

    # Without the barrier the compiler swaps the factors in place of transposing the result.
    (held,) = xla.optimization_barrier(columns)
    return tf.linalg.matrix_transpose(held)[..., :num_rows, :]
