"""Adafactor (Shazeer and Stern 2018) with the paper's settings (A.2), as pure functions.

The slots of a matrix average its squared gradient over the columns (`row`) and over the rows
(`column`), of which either may be several dims: attention's weights are M by N * D. Dims before
those, such as E, are a batch of matrices, because experts see different tokens. A slot has its
weight's dims without the averaged ones, as the optimizer's lowercase letters. The weights in a
stack are updated like single weights: each has its own clipping and its own scale.

A.2 (c) wants a decay of "0.99 with 1 - t^-0.8 schedule". With exactly these settings, Lingvo
ignores the 0.99, and so does the default here; beta2=0.99 caps the schedule from step 316 on.
"""

from __future__ import annotations

import functools
import math

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.schedules import SqrtDecay
from lingvo_gshard.sharding.layout import TensorSpec

_EPSILON_1 = 1e-30  # Keeps the second moment above 0.
_EPSILON_2 = 1e-3  # The smallest scale of a weight, so that a zero one can move.


class Adafactor:
    """Factored second moments, no momentum, clipped updates, step sizes relative to the weights."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = InstantiableParams(cls)
        p.Define("schedule", SqrtDecay.Params(), "The learning rate.")
        p.Define("beta2", 1.0, "The decay at step t is min(beta2, 1 - t^-decay_exponent).")
        p.Define("decay_exponent", 0.8, "See beta2.")
        p.Define("clipping_threshold", 1.0, "The maximum root mean square of an update (A.2d).")
        return p

    def __init__(self, params: InstantiableParams) -> None:
        self.p = p = params.Copy().Freeze()
        if not p.clipping_threshold > 0:
            raise _out_of_range("clipping_threshold", "above 0", p.clipping_threshold)
        if not p.decay_exponent > 0:
            raise _out_of_range("decay_exponent", "above 0", p.decay_exponent)
        if not 0 < p.beta2 <= 1:
            raise _out_of_range("beta2", "in (0, 1]", p.beta2)
        self._schedule = p.schedule.Instantiate()

    def slot_specs(self, weight_specs: NestedMap) -> NestedMap:
        """Returns the slots of each weight: `row` and `column`, or `full` for vectors, scalars."""
        return weight_specs.Transform(_slot_specs)

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate after `step` updates, an int32 scalar."""
        return self._schedule.rate(tf.cast(step, tf.float32) + 1.0)

    def update(
        self,
        theta: NestedMap,
        slots: NestedMap,
        gradients: NestedMap,
        step: tf.Tensor,
        *,
        weight_specs: NestedMap,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns the new theta and slots after one update of all weights, which are float32.

        `step`, an int32 scalar, is the number of earlier updates. The results are not annotated,
        because they are results of a program, for which the caller gives the shardings.
        """
        t = tf.cast(step, tf.float32) + 1.0
        decay = tf.minimum(self.p.beta2, 1.0 - t**-self.p.decay_exponent)
        rate = self.learning_rate(step)

        # Algorithm 4 of Adafactor's paper for matrices, 5 for vectors and scalars. It is a function
        # of its own, since it is traced once for all weights of equal shape.
        @functools.partial(tf.function, autograph=False)
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

        # Each weight takes its own slots from the list of all, where they follow each other.
        old_slots = iter(slots.Flatten())
        new_slots: list[tf.Tensor] = []
        new_weights: list[tf.Tensor] = []
        leaves = zip(theta.Flatten(), gradients.Flatten(), weight_specs.Flatten(), strict=True)
        for weight, gradient, spec in leaves:
            averaged = _averaged(spec)
            weight_slots = {name: next(old_slots) for name in averaged}
            weight, weight_slots = step_of(weight, gradient, weight_slots, spec.axes, averaged)
            new_weights.append(weight)
            new_slots += [weight_slots[name] for name in averaged]
        return theta.Pack(new_weights), slots.Pack(new_slots)


def _out_of_range(name: str, expected: str, value: float) -> ValueError:
    return ValueError(f"Adafactor: {name} must be {expected}, got {value}.")


def _averaged(spec: WeightSpec) -> dict[str, tuple[int, ...]]:
    """Returns the axes over which each slot is a mean, by the slot's name in sorted order.

    Axes are counted from the last one, -1, so that they are those of a stack's weights, too.
    """
    if len(spec.axes) < 2:
        return {"full": ()}
    row_axes = range(-spec.columns - spec.rows, -spec.columns)
    column_axes = range(-spec.columns, 0)
    return {"column": tuple(row_axes), "row": tuple(column_axes)}


def _slot_specs(spec: WeightSpec) -> NestedMap:
    slots = NestedMap()
    rank = len(spec.shape)
    for name, averaged_axes in _averaged(spec).items():
        kept = [axis for axis in range(rank) if axis - rank not in averaged_axes]
        shape = tuple(spec.shape[axis] for axis in kept)
        dims = "".join(spec.dims[axis] for axis in kept)
        slots[name] = TensorSpec(shape, "float32", dims.lower(), spec.stack)
    return slots


def _decayed(
    slots: dict[str, tf.Tensor],
    gradient: tf.Tensor,
    averaged: dict[str, tuple[int, ...]],
    decay: tf.Tensor,
) -> dict[str, tf.Tensor]:
    """Returns the slots, moving averages of the squared gradient's means, after one more step."""
    squared = tf.square(gradient)
    means = {name: _mean(squared, axes) if axes else squared for name, axes in averaged.items()}
    # Epsilon_1 is added to the means, as the squares would be one more tensor as large.
    means = {name: mean + _EPSILON_1 for name, mean in means.items()}
    return {name: decay * slot + (1.0 - decay) * means[name] for name, slot in slots.items()}


def _inverse_root(slots: dict[str, tf.Tensor], averaged: dict[str, tuple[int, ...]]) -> tf.Tensor:
    """Returns 1 / sqrt of the second moment: the rank-one matrix row * column / mean(row)."""
    if "full" in slots:
        return slots["full"] ** -0.5

    # A column was averaged over the dims of rows, and a row over those of columns.
    num_rows = len(averaged["column"])
    num_columns = len(averaged["row"])
    row = slots["row"]
    column = slots["column"]

    # The row's mean would otherwise be a factor of both.
    row_axes = tuple(range(-num_rows, 0))
    row = (row / _mean(row, row_axes, keepdims=True)) ** -0.5

    # Both with all dims of the weight: [..., rows, 1] and [..., 1, columns].
    batch = column.shape[:-num_columns]
    columns = column.shape[-num_columns:]
    row = tf.reshape(row, [*row.shape, *[1] * num_columns])
    return row * tf.reshape(column**-0.5, [*batch, *[1] * num_rows, *columns])


def _rms(x: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    """Returns the root mean square over the axes, which stay as dims of size 1."""
    # Powers of vectors and scalars: exporting takes 7 ms for each tf.sqrt or tf.math.rsqrt.
    return _mean(tf.square(x), axes, keepdims=True) ** 0.5


def _mean(x: tf.Tensor, axes: tuple[int, ...], keepdims: bool = False) -> tf.Tensor:
    """Returns tf.reduce_mean, computed with a scalar divisor.

    TensorFlow's own divisor has the shape of the result, and all results of that shape share it.
    It would carry the sharding of one weight's means, such as the experts' [R, E], over to
    another's, such as the router's, which then would be updated in parts and gathered.
    """
    count = math.prod(x.shape[axis] for axis in axes)
    return tf.reduce_sum(x, axes, keepdims=keepdims) / float(count)
