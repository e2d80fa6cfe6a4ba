"""What all optimizers share: a learning rate, clipping by the global norm, a walk over the weights.

An optimizer is a set of pure functions. A subclass gives the slots of a weight and the step of one
weight; everything here applies them to whole trees, whose structure is that of theta.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.hyperparams import InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.schedules import SqrtDecay
from lingvo_gshard.sharding.layout import TensorSpec

# (weight, gradient, slots by name, **facts of the weight) -> (new weight, new slots by name)
WeightStep = Callable[..., tuple[Any, dict[str, Any]]]


class Optimizer(abc.ABC):
    """Turns gradients into new weights and new slots."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = InstantiableParams(cls)
        p.Define("schedule", SqrtDecay.Params(), "The learning rate.")
        p.Define(
            "max_gradient_norm",
            None,
            "All gradients are scaled down so that their joint norm is at most this.",
            optional=float,
        )
        return p

    def __init__(self, params: InstantiableParams) -> None:
        self.p = p = params.Copy().Freeze()
        if p.max_gradient_norm is not None:
            self._check_range("max_gradient_norm", p.max_gradient_norm > 0, "above 0")
        self._schedule = p.schedule.Instantiate()

    @abc.abstractmethod
    def _slot_specs(self, spec: WeightSpec) -> NestedMap:
        """Returns the TensorSpecs of one weight's slots, by name."""

    @abc.abstractmethod
    def _weight_step(self, step: tf.Tensor) -> WeightStep:
        """Returns the function that takes update number `step`, an int32 scalar, of one weight."""

    @abc.abstractmethod
    def _facts(self, path: str, spec: WeightSpec) -> dict[str, Any]:
        """Returns what the weight's step has to know of it: arguments that are no tensors."""

    def slot_specs(self, weight_specs: NestedMap) -> NestedMap:
        """Returns the TensorSpecs of all slots: a NestedMap in the place of each weight."""
        return weight_specs.Transform(self._own_slot_specs)

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate after `step` updates, an int32 scalar."""
        return self._schedule.rate(count(step))

    def clipped(self, gradients: NestedMap, norm: tf.Tensor) -> NestedMap:
        """Returns the gradients, whose joint norm is `norm`, scaled to at most max_gradient_norm.

        That is Pascanu et al.'s clipping (2013, algorithm 1). A norm that is not finite makes all
        gradients so.
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

        `step`, an int32 scalar, is the number of earlier updates. The results are not annotated,
        because they are results of a program, for which the caller gives the shardings.
        """
        # A function of its own, since it is traced once for all weights of equal shape.
        weight_step = tf.function(self._weight_step(step), autograph=False)

        # Each weight takes its own slots from the list of all, where they follow each other.
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

    def _own_slot_specs(self, spec: WeightSpec) -> NestedMap:
        """Returns the specs of a weight's slots: none, unless the optimizer takes its steps."""
        return self._slot_specs(spec) if spec.is_optimized else NestedMap()

    def _check_range(self, name: str, is_right: bool, expected: str) -> None:
        """Raises ValueError, which names the setting and its value, unless `is_right`."""
        if not is_right:
            kind = type(self).__name__
            raise ValueError(f"{kind}: {name} must be {expected}, got {self.p.Get(name)}.")


def slot(spec: WeightSpec, axes: Sequence[int]) -> TensorSpec:
    """Returns the TensorSpec of a float32 slot that has the axes of a weight that are listed."""
    shape = tuple(spec.shape[axis] for axis in axes)
    dims = "".join(spec.dims[axis] for axis in axes)
    # Lowercase letters are the optimizer's: its slots may be split further than weights.
    return TensorSpec(shape, "float32", dims.lower(), spec.stack)


def count(step: tf.Tensor) -> tf.Tensor:
    """Returns t = 1, 2, ..., the number of this update, as float32."""
    return tf.cast(step, tf.float32) + 1.0
