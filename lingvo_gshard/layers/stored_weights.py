"""Weights as decoders keep them: laid out for products of few rows, and perhaps in fewer bits.

A step of decoding reads all weights to multiply a few rows, so it takes as long as reading them
does. A decoder's weights are made once, before its program runs, and take the place of the float32
ones in theta. By `Numbers`, a large weight is

  FLOAT32           a float32 tensor, as it was trained
  FLOAT32_LAID_OUT  a NestedMap of `kept`, float32: the same numbers
  BFLOAT16          a NestedMap of `kept`, bfloat16
  INT8              a NestedMap of `kept`, int8, and `scales`, float32: about scales * kept

A factor [..., K, N], whose rows K are contracted, is kept as [..., N, K], which is how a product
reads it, with scales [..., N]. A table [V, M] is kept as it is, with scales [V]: its rows are read
by their index, and as a factor it is transposed.

All other weights, such as biases and routers, stay float32.

K contracted, N columns, R rows, V vocabulary, M model.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

from lingvo_gshard.core.base_layer import Use, WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.sharding.layout import TensorSpec

# A float32 tensor, or the NestedMap that a weight is kept as.
Weight: TypeAlias = "tf.Tensor | NestedMap"

# Up to so many rows, a product has the weight as its left factor. XLA's library for CPUs copies the
# right factor at each call into the order that it multiplies in, and reads the left one in place.
# With more rows the copy is a small part of the work, and wide right factors are multiplied faster.
# Where a CPU has no matrix units, that is so of bfloat16 from few rows on.
_MAX_LEFT_ROWS = {"float32": 128, "bfloat16": 16, "int8": 64}

# The largest int8 that has a negative: the numbers are symmetric around 0.
_MAX_INT8 = 127.0
# Below any number that matters, and above zero: the largest number of a row of zeros.
_TINY = 1e-30


class Numbers(enum.Enum):
    """What large weights are made of while a model decodes."""

    FLOAT32 = "float32"
    FLOAT32_LAID_OUT = "float32_laid_out"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @property
    def dtype(self) -> str:
        """The dtype of large weights."""
        return "float32" if self is Numbers.FLOAT32_LAID_OUT else self.value


def numbers_of(theta: NestedMap) -> Numbers:
    """Returns what the large weights of a tree of tensors are made of."""
    for path, tensor in theta.FlattenItems():
        if path.endswith(".kept"):
            dtype = tf.as_dtype(tensor.dtype).name
            return Numbers.FLOAT32_LAID_OUT if dtype == "float32" else Numbers(dtype)
    return Numbers.FLOAT32


def specs(weight_specs: NestedMap, numbers: Numbers) -> NestedMap:
    """Returns the TensorSpecs of the weights as they are kept, given their WeightSpecs."""
    return weight_specs.Transform(lambda spec: _spec(spec, numbers))


def _spec(spec: WeightSpec, numbers: Numbers) -> TensorSpec | NestedMap:
    """Returns the TensorSpec of a weight, or those of what it is kept as."""
    if spec.use is Use.EXACT or numbers is Numbers.FLOAT32:
        return TensorSpec(spec.shape, "float32", spec.dims, spec.stack)

    order = _order(spec)
    shape = tuple(spec.shape[axis] for axis in order)
    dims = "".join(spec.dims[axis] for axis in order)
    specs = NestedMap(kept=TensorSpec(shape, numbers.dtype, dims, spec.stack))
    if numbers is Numbers.INT8:
        outer = len(shape) - _num_contracted(spec)
        specs.scales = TensorSpec(shape[:outer], "float32", dims[:outer], spec.stack)
    return specs


def _order(spec: WeightSpec) -> list[int]:
    """Returns the axes of a weight in the order in which it is kept: those contracted last."""
    axes = list(range(len(spec.shape)))
    if spec.use is Use.TABLE:
        return axes
    first_row = len(axes) - spec.rows - spec.columns
    first_column = len(axes) - spec.columns
    return axes[:first_row] + axes[first_column:] + axes[first_row:first_column]


def _num_contracted(spec: WeightSpec) -> int:
    return spec.columns if spec.use is Use.TABLE else spec.rows


def kept(theta: NestedMap, weight_specs: NestedMap, numbers: Numbers) -> NestedMap:
    """Returns float32 weights as they are kept, of the specs that `specs` returns."""
    return theta.Transform(lambda weight, spec: _kept(weight, spec, numbers), weight_specs)


def _kept(weight: tf.Tensor, spec: WeightSpec, numbers: Numbers) -> Weight:
    if spec.use is Use.EXACT or numbers is Numbers.FLOAT32:
        return weight

    laid_out = tf.transpose(weight, _order(spec))
    if numbers is not Numbers.INT8:
        return NestedMap(kept=tf.cast(laid_out, numbers.dtype))

    rounded, scales = _quantized(laid_out, _num_contracted(spec))
    return NestedMap(kept=rounded, scales=scales)


def _quantized(x: tf.Tensor, num_contracted: int = 1) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns int8 numbers, and float32 scales without the last dims, whose product is about x.

    The largest element of the last dims is 127 or -127; the others are rounded to the nearest.
    """
    last = list(range(len(x.shape) - num_contracted, len(x.shape)))
    largest = tf.reduce_max(tf.abs(x), last, keepdims=True)
    scales = tf.maximum(largest, _TINY) / _MAX_INT8
    rounded = tf.cast(tf.round(x / scales), tf.int8)
    return rounded, tf.squeeze(scales, last)


def rows(table: Weight, ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a table [V, M] at int32 ids [...], in float32: [..., M]."""
    if not isinstance(table, NestedMap):
        return tf.gather(table, ids)

    read = tf.cast(tf.gather(table.kept, ids), tf.float32)
    if "scales" not in table:
        return read
    return read * tf.gather(table.scales, ids)[..., None]


def as_factor(table: Weight) -> Weight:
    """Returns the transpose of a table [V, M], for products that contract M."""
    return table if isinstance(table, NestedMap) else tf.transpose(table)


def shape(weight: Weight, num_batch: int, num_contracted: int) -> list[int]:
    """Returns the shape [batch, K..., N...] of a factor, kept or not."""
    if not isinstance(weight, NestedMap):
        return list(weight.shape)
    sizes = list(weight.kept.shape)
    first_row = len(sizes) - num_contracted
    return sizes[:num_batch] + sizes[first_row:] + sizes[num_batch:first_row]


def as_matrix(weight: Weight, depth: int) -> Weight:
    """Returns a factor [K..., N...] as a matrix [K, N], given K; a kept one is [N, K]."""
    if not isinstance(weight, NestedMap):
        return tf.reshape(weight, [depth, -1])

    matrix = NestedMap(kept=tf.reshape(weight.kept, [-1, depth]))
    if "scales" in weight:
        matrix.scales = tf.reshape(weight.scales, [-1])
    return matrix


def product(x: tf.Tensor, weight: NestedMap) -> tf.Tensor:
    """Returns x [..., R, K] times a factor that is kept as [..., N, K]: [..., R, N], in x's dtype.

    x is rounded to the weight's numbers, to int8 with a scale for each row of x. Products of int8
    are summed exactly, others in float32.
    """
    if "scales" not in weight:
        sums = _dot(tf.cast(x, weight.kept.dtype), weight.kept, tf.float32)
        return tf.cast(sums, x.dtype)

    rounded, x_scales = _quantized(tf.cast(x, tf.float32))
    sums = tf.cast(_dot(rounded, weight.kept, tf.int32), tf.float32)
    return tf.cast(sums * x_scales[..., None] * weight.scales[..., None, :], x.dtype)


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
