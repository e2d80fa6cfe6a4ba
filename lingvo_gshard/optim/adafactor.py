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
        for name in ("clipping_threshold", "decay_exponent", "beta2"):
            if not 0 < p.Get(name) <= (1 if name == "beta2" else math.inf):
                expected = "in (0, 1]" if name == "beta2" else "above 0"
                raise ValueError(f"Adafactor: {name} must be {expected}, got {p.Get(name)}.")
        self._schedule = self.p.schedule.Instantiate()

    def slot_specs(self, weight_specs: NestedMap) -> NestedMap:
        """The slots of each weight: `row` and `column`, or `full` for vectors and scalars."""
        return weight_specs.Transform(_slot_specs)

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """The learning rate after `step` updates, an int32 scalar."""
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
        old_slots = iter(slots.Flatten())  # In the order of their weights, `column` before `row`.
        new_slots: list[tf.Tensor] = []

        @functools.partial(tf.function, autograph=False)  # Traced once for weights of equal shape.
        def step_of(
            weight: tf.Tensor,
            gradient: tf.Tensor,
            old: dict[str, tf.Tensor],
            axes: tuple[int, ...],
            averaged: dict[str, tuple[int, ...]],
        ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
            squared = tf.square(gradient)
            means = {k: _mean(squared, over) if over else squared for k, over in averaged.items()}
            # Epsilon_1 is added to the means, as the squares would be one more tensor as large.
            means = {k: mean + 1e-30 for k, mean in means.items()}
            own = {k: decay * slot + (1.0 - decay) * means[k] for k, slot in old.items()}
            update = gradient * _inverse_root(own, averaged)
            update /= tf.maximum(1.0, _rms(update, axes) / self.p.clipping_threshold)
            scale = tf.maximum(1e-3, _rms(weight, axes))  # 1e-3 is epsilon_2.
            return weight - rate * scale * update, own

        def updated(weight: tf.Tensor, gradient: tf.Tensor, spec: WeightSpec) -> tf.Tensor:
            averaged = _averaged(spec)
            old = {name: next(old_slots) for name in averaged}
            weight, new = step_of(weight, gradient, old, spec.axes, averaged)
            new_slots.extend(new[name] for name in averaged)
            return weight

        theta = theta.Transform(updated, gradients, weight_specs)
        return theta, slots.Pack(new_slots)


def _averaged(spec: WeightSpec) -> dict[str, tuple[int, ...]]:
    """The axes, counted from the last, over which each slot is a mean, by name in sorted order."""
    if len(spec.axes) < 2:
        return {"full": ()}
    first = -spec.columns - spec.rows
    return {"column": tuple(range(first, -spec.columns)), "row": tuple(range(-spec.columns, 0))}


def _slot_specs(spec: WeightSpec) -> NestedMap:
    slots, rank = NestedMap(), len(spec.shape)
    for name, over in _averaged(spec).items():
        kept = [axis for axis in range(rank) if axis - rank not in over]
        shape, dims = tuple(spec.shape[i] for i in kept), "".join(spec.dims[i] for i in kept)
        slots[name] = TensorSpec(shape, "float32", dims.lower())
    return slots


def _inverse_root(slots: dict[str, tf.Tensor], averaged: dict[str, tuple[int, ...]]) -> tf.Tensor:
    """1 / sqrt of the second moment, which is the rank-one matrix row * column / mean(row)."""
    if "full" in slots:
        return slots["full"] ** -0.5
    rows, columns = map(len, averaged.values())
    row, column = slots["row"], slots["column"]
    row = (row / _mean(row, tuple(range(-rows, 0)), keepdims=True)) ** -0.5
    batch, shape = column.shape[:-columns], column.shape[-columns:]
    row = tf.reshape(row, [*row.shape, *[1] * columns])
    return row * tf.reshape(column**-0.5, [*batch, *[1] * rows, *shape])


def _rms(x: tf.Tensor, axes: tuple[int, ...]) -> tf.Tensor:
    # Powers of vectors and scalars: exporting takes 7 ms for each tf.sqrt or tf.math.rsqrt.
    return _mean(tf.square(x), axes, keepdims=True) ** 0.5


def _mean(x: tf.Tensor, axes: tuple[int, ...], keepdims: bool = False) -> tf.Tensor:
    """tf.reduce_mean with a scalar divisor.

    TensorFlow's own divisor has the shape of the result, and all results of that shape share it.
    It would carry the sharding of one weight's means, such as the experts' [R, E], over to
    another's, such as the router's, which then would be updated in parts and gathered.
    """
    count = math.prod(x.shape[axis] for axis in axes)
    return tf.reduce_sum(x, axes, keepdims=keepdims) / float(count)
