"""The common part of optimizers: learning rate, clipping by the global norm, loop over the weights.

An optimizer is a set of pure functions. A subclass gives the slots of a weight and the step of one
weight; this class applies them to whole trees, which have theta's structure.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.configured import Configured
from lingvo_gshard.core.hyperparams import InstantiableParams, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.schedules import SqrtDecay
from lingvo_gshard.sharding.layout import TensorSpec

# (weight, gradient, slots by name, **facts of the weight) -> (new weight, new slots by name)
WeightStep = Callable[..., tuple[Any, dict[str, Any]]]


class Optimizer(Configured, abc.ABC):
    """Turns gradients into new weights and new slots."""

    class Params(Configured.Params):
        schedule: InstantiableParams = setting(SqrtDecay.Params(), "The learning rate.")
        max_gradient_norm: float | None = setting(
            None, "The maximum joint norm of all gradients; above it, all of them are scaled down."
        )

    p: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        norm = self.p.max_gradient_norm
        self._check_setting("max_gradient_norm", norm is None or norm > 0, "above 0")
        self._schedule = self.p.schedule.Instantiate()

    @abc.abstractmethod
    def _slot_specs(self, spec: WeightSpec) -> NestedMap:
        """Returns the TensorSpecs of one weight's slots, by name."""

    @abc.abstractmethod
    def _weight_step(self, step: tf.Tensor) -> WeightStep:
        """Returns the function that makes update number `step`, an int32 scalar, of one weight."""

    @abc.abstractmethod
    def _facts(self, path: str, spec: WeightSpec) -> dict[str, Any]:
        """Returns the facts of a weight that its step needs: arguments that are not tensors."""

    def slot_specs(self, weight_specs: NestedMap) -> NestedMap:
        """Returns the TensorSpecs of all slots: a NestedMap in the place of each weight.

        It is empty for a weight that the optimizer does not update.
        """
        return weight_specs.Transform(
            lambda spec: self._slot_specs(spec) if spec.is_optimized else NestedMap()
        )

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate after `step` updates, an int32 scalar."""
        return self._schedule.rate(count(step))

    def clipped(self, gradients: NestedMap, norm: tf.Tensor) -> NestedMap:
        """Returns the gradients, whose joint norm is `norm`, scaled to at most max_gradient_norm.

        This is the clipping of Pascanu et al. (2013, algorithm 1). If the norm is not finite, no
        gradient is.
        """
        largest = self.p.max_gradient_norm
        if largest is None:
            return gradients
        scale = largest / tf.maximum(norm, largest)
        return gradients.Transform(lambda gradient: gradient * scale)

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

        `step`, an int32 scalar, is the number of earlier updates. The results are not annotated:
        they are results of a program, whose shardings the caller gives.
        """
        # A tf.function, so that it is traced once for all weights of equal shape.
        weight_step = tf.function(self._weight_step(step), autograph=False)

        # Each weight takes its slots from the flat list, which has the same order.
        old_slots = iter(slots.Flatten())
        new_slots: list[tf.Tensor] = []
        new_weights: list[tf.Tensor] = []
        leaves = zip(theta.Flatten(), gradients.Flatten(), weight_specs.FlattenItems(), strict=True)
        for weight, gradient, (path, spec) in leaves:
            if spec.is_frozen:
                new_weights.append(weight)
                continue
            if spec.sign_step is not None:
                new_weights.append(weight - spec.sign_step * tf.sign(gradient))
                continue

            names = sorted(self._slot_specs(spec))
            weight_slots = {name: next(old_slots) for name in names}
            facts = self._facts(path, spec)
            weight, weight_slots = weight_step(weight, gradient, weight_slots, **facts)
            new_weights.append(weight)
            new_slots += [weight_slots[name] for name in names]
        return theta.Pack(new_weights), slots.Pack(new_slots)


def slot(spec: WeightSpec, axes: Sequence[int]) -> TensorSpec:
    """Returns the TensorSpec of a float32 slot that has the given axes of a weight."""
    shape = tuple(spec.shape[axis] for axis in axes)
    dims = "".join(spec.dims[axis] for axis in axes)
    # Lowercase letters are the optimizer's: its slots may be split further than weights.
    return TensorSpec(shape, "float32", dims.lower(), spec.stack)


def count(step: tf.Tensor) -> tf.Tensor:
    """Returns t = 1, 2, ..., the number of this update, as float32."""
    return tf.cast(step, tf.float32) + 1.0
