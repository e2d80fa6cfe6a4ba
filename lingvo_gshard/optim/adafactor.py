"""Adafactor (Shazeer and Stern 2018) with the paper's settings (A.2), as pure functions.

The slots of a matrix average its squared gradient over the columns (`row`) and over the rows
(`column`). Rows and columns may each be several dims: attention's weights are M by N * D. Any dims
before them, such as E, form a batch of matrices, because experts see different tokens. A slot has
its weight's dims without the averaged ones, as the optimizer's lowercase letters. The weights in a
stack are updated like single weights: each has its own clipping and its own scale.

A.2 (c) wants a decay of "0.99 with 1 - t^-0.8 schedule". With exactly these settings, Lingvo
ignores the 0.99, and so does the default here; beta2=0.99 caps the schedule from step 316 on.
"""

from __future__ import annotations

import math
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.optimizer import Optimizer, WeightStep, count, slot

_EPSILON_1 = 1e-30  # Keeps the second moment above 0.
_EPSILON_2 = 1e-3  # The smallest scale of a weight, so that a zero weight can move.


class Adafactor(Optimizer):
    """Factored second moments, no momentum, clipped updates, step sizes relative to the weights.

    The slots of a matrix are `row` and `column`; biases and scales, of any dims, have `full`.
    """

    class Params(Optimizer.Params):
        beta2: float = setting(1.0, "The decay at step t is min(beta2, 1 - t^-decay_exponent).")
        decay_exponent: float = setting(0.8, "See beta2.")
        clipping_threshold: float = setting(
            1.0, "The maximum root mean square of an update (A.2d)."
        )

    p: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        p = self.p
        self._check_setting("clipping_threshold", p.clipping_threshold > 0, "above 0")
        self._check_setting("decay_exponent", p.decay_exponent > 0, "above 0")
        self._check_setting("beta2", 0 < p.beta2 <= 1, "in (0, 1]")

    def _slot_specs(self, spec: WeightSpec) -> NestedMap:
        slots = NestedMap()
        rank = len(spec.shape)
        for name, averaged_axes in _averaged(spec).items():
            kept = [axis for axis in range(rank) if axis - rank not in averaged_axes]
            slots[name] = slot(spec, kept)
        return slots

    def _facts(self, path: str, spec: WeightSpec) -> dict[str, Any]:
        return {"axes": spec.axes, "averaged": _averaged(spec)}

    def _weight_step(self, step: tf.Tensor) -> WeightStep:
        t = count(step)
        decay = tf.minimum(self.p.beta2, 1.0 - t**-self.p.decay_exponent)
        rate = self.learning_rate(step)

        # Algorithm 4 of Adafactor's paper for matrices, 5 for biases and scales.
        def step_of(
            weight: tf.Tensor,
            gradient: tf.Tensor,
            slots: dict[str, tf.Tensor],
            axes: tuple[int, ...],
            averaged: dict[str, tuple[int, ...]],
        ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            # The gradient over the root of its second moment.
            slots = _decayed(slots, gradient, averaged, decay)
            update = gradient * _inverse_root(slots, averaged)

            # Clipped: its root mean square is at most the threshold.
            update /= tf.maximum(1.0, _rms(update, axes) / self.p.clipping_threshold)

            # A step is relative to the scale of the weight itself.
            scale = tf.maximum(_EPSILON_2, _rms(weight, axes))
            return weight - rate * scale * update, slots

        return step_of


def _averaged(spec: WeightSpec) -> dict[str, tuple[int, ...]]:
    """Returns the axes over which each slot is a mean, by the slot's name in sorted order.

    Axes count back from the last one, -1, so that they also hold for a stack of weights.
    """
    if not spec.is_matrix:
        return {"full": ()}
    row_axes = range(-spec.columns - spec.rows, -spec.columns)
    column_axes = range(-spec.columns, 0)
    return {"column": tuple(row_axes), "row": tuple(column_axes)}


def _decayed(
    slots: dict[str, tf.Tensor],
    gradient: tf.Tensor,
    averaged: dict[str, tuple[int, ...]],
    decay: tf.Tensor,
) -> dict[str, tf.Tensor]:
    """Returns the slots, moving averages of the squared gradient's means, after one more step."""
    squared = tf.square(gradient)
    means = {name: _mean(squared, axes) if axes else squared for name, axes in averaged.items()}
    # Epsilon_1 is added to the means; adding it to the squares would make another large tensor.
    means = {name: mean + _EPSILON_1 for name, mean in means.items()}
    return {name: decay * slot + (1.0 - decay) * means[name] for name, slot in slots.items()}


def _inverse_root(slots: dict[str, tf.Tensor], averaged: dict[str, tuple[int, ...]]) -> tf.Tensor:
    """Returns 1 / sqrt of the second moment: the rank-one matrix row * column / mean(row)."""
    if "full" in slots:
        return slots["full"] ** -0.5

    # `column` was averaged over the dims of the rows, and `row` over the dims of the columns.
    num_rows = len(averaged["column"])
    num_columns = len(averaged["row"])
    row = slots["row"]
    column = slots["column"]

    # Otherwise the row's mean would be a factor of both.
    row_axes = tuple(range(-num_rows, 0))
    row = (row / _mean(row, row_axes, keepdims=True)) ** -0.5

    # Give both all dims of the weight: [..., rows, 1] and [..., 1, columns].
    batch = column.shape[:-num_columns]
    columns = column.shape[-num_columns:]
    row = tf.reshape(row, [*row.shape, *[1] * num_columns])
    return row * tf.reshape(column**-0.5, [*batch, *[1] * num_rows, *columns])


def _rms(x: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    """Returns the root mean square over the axes, which stay as dims of size 1."""
    # ** 0.5 of vectors and scalars: exporting takes 7 ms for each tf.sqrt or tf.math.rsqrt.
    return _mean(tf.square(x), axes, keepdims=True) ** 0.5


def _mean(x: tf.Tensor, axes: tuple[int, ...], keepdims: bool = False) -> tf.Tensor:
    """Returns tf.reduce_mean, computed with a scalar divisor.

    TensorFlow's own divisor has the shape of the result, and all results of that shape share it. So
    it would carry the sharding of one weight's means, such as the experts' [R, E], over to
    another's, such as the router's, which would then be updated in parts and gathered.
    """
    count = math.prod(x.shape[axis] for axis in axes)
    return tf.reduce_sum(x, axes, keepdims=keepdims) / float(count)
