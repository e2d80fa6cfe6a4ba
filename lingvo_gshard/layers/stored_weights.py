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

Products read both forms as a Weight (weight.py). K contracted, N columns, V vocabulary, M model.
"""

from __future__ import annotations

import enum

from lingvo_gshard.core.base_layer import Use, WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.weight import quantized
from lingvo_gshard.sharding.layout import TensorSpec


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
    """Returns the numbers that a tree of tensors has as its large weights."""
    for path, tensor in theta.FlattenItems():
        if path.endswith(".kept"):
            dtype = tf.as_dtype(tensor.dtype).name
            return Numbers.FLOAT32_LAID_OUT if dtype == "float32" else Numbers(dtype)
    return Numbers.FLOAT32


def specs(weight_specs: NestedMap, numbers: Numbers) -> NestedMap:
    """Returns the TensorSpecs of the weights as they are kept, given their WeightSpecs."""
    return weight_specs.Transform(lambda spec: _spec(spec, numbers))


def _spec(spec: WeightSpec, numbers: Numbers) -> TensorSpec | NestedMap:
    """Returns the TensorSpec of a weight, or a NestedMap of TensorSpecs if it is laid out."""
    if not spec.use.is_large or numbers is Numbers.FLOAT32:
        return TensorSpec(spec.shape, "float32", spec.dims, spec.stack)

    # Laid out, the dims move with their axes. Scales have all dims but the contracted ones.
    order = _order(spec)
    shape = tuple(spec.shape[axis] for axis in order)
    dims = "".join(spec.dims[axis] for axis in order)
    specs = NestedMap(kept=TensorSpec(shape, numbers.dtype, dims, spec.stack))
    if numbers is Numbers.INT8:
        outer = len(shape) - _num_contracted(spec)
        specs.scales = TensorSpec(shape[:outer], "float32", dims[:outer], spec.stack)
    return specs


def _order(spec: WeightSpec) -> list[int]:
    """Returns the axes of a weight in the order in which it is kept: contracted ones last."""
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


def _kept(weight: tf.Tensor, spec: WeightSpec, numbers: Numbers) -> tf.Tensor | NestedMap:
    if not spec.use.is_large or numbers is Numbers.FLOAT32:
        return weight

    laid_out = tf.transpose(weight, _order(spec))
    if numbers is not Numbers.INT8:
        return NestedMap(kept=tf.cast(laid_out, numbers.dtype))

    # A scale for each column, over all rows that a product sums.
    rounded, scales = quantized(laid_out, _num_contracted(spec))
    return NestedMap(kept=rounded, scales=scales)
