"""A batch's loss and gradients, at once or as the sum over its microbatches, in a loop.

With N microbatches, activations exist for one of them at a time, and the gradients equal the whole
batch's up to rounding. The batch's loss is the mean of the microbatches' losses,

    L = 1/n * sum over tokens of l_nll + k * l_aux = 1/N * sum_i L_i
    L_i = N/n * sum over microbatch i's tokens of l_nll + k * l_aux_i

where n is the number of tokens of the whole batch: a token weighs the same in whichever microbatch
it is. l_aux is a mean over groups, and all microbatches have the same number of groups. A layer's
sum over the tokens of its stack, such as a router's z-loss, is divided by n/N of that stack. So
every term is linear in the rows. Other metrics are computed from the means: see Task.Metrics.

Each device cuts its own rows into N parts, so rows do not move. Experts' groups are formed within a
microbatch; they equal the whole batch's groups if a device's part holds whole groups.

Nothing in the loop needs the sum of a weight's gradient over the devices. The compilers for TPUs
and GPUs see that each gradient is only added to the earlier ones, and sum most gradients over the
devices once, after the loop. They do not see through a loop over layers, nor does the compiler for
CPUs: there, the devices sum in every microbatch.

N microbatches, B batch, D partitions of its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Whole
from lingvo_gshard.layers.routing import at_least_one
from lingvo_gshard.sharding.annotator import Annotator

# (theta, features, labels, context) -> (loss, terms of metrics), like a task's Loss.
LossFn = Callable[[NestedMap, NestedMap, NestedMap, Context], "tuple[tf.Tensor, NestedMap]"]
# (theta, features, labels, context) -> (loss, terms of metrics, gradients). The gradients are split
# by Annotator.gradient_dims. The terms are means over the N microbatches, like a pipeline's
# reports, and so the whole batch's. Counts, whose names begin with `num_`, are sums.
GradientsFn = Callable[
    [NestedMap, NestedMap, NestedMap, Context], "tuple[tf.Tensor, NestedMap, NestedMap]"
]

# A pipeline's microbatches use the random numbers of the indices below this one.
_INDEX_STEP = 2**16


def check(count: int, rows: int, partitions: int) -> None:
    """Raises ValueError if the rows of a partition can't be cut into `count` microbatches."""
    if count > 1 and rows % (count * partitions):
        raise ValueError(
            f"train.gradient_accumulation_steps={count} does not divide a batch of {rows} rows "
            f"into parts for {partitions} partitions; choose a divisor of {rows // partitions}."
        )


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """Computes a batch's gradients in `count` (N) microbatches; 1 stands for the batch at once."""

    loss_fn: LossFn
    num_tokens: Callable[[NestedMap], tf.Tensor]  # The number of tokens in the loss's mean.
    weight_specs: NestedMap  # WeightSpecs.
    annotator: Annotator
    count: int

    @property
    def gradients(self) -> GradientsFn:
        """Returns the function of a batch to its gradients."""
        return self._at_once if self.count == 1 else self._in_microbatches

    def _in_microbatches(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """See GradientsFn; raises ValueError if N does not divide the rows that a partition has."""
        # Each token's share of a mean does not depend on the microbatch that it is in.
        mean_tokens = at_least_one(self.num_tokens(labels)) / self.count
        whole_batch = Whole(features, self.count, tf.compat.v1.get_default_graph())
        context = dataclasses.replace(context, mean_tokens=mean_tokens, whole=whole_batch)
        whole = NestedMap(features=features, labels=labels)
        microbatches = whole.Transform(self._divided)

        loss, terms, gradients = self._loop(theta, microbatches, context)
        # Counts are sums over the microbatches; all other terms are means.
        for name in terms:
            if name.startswith("num_"):
                terms[name] *= self.count
        return loss, terms, gradients

    def _at_once(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """Returns the loss of some rows, its terms, and the gradients of its share, 1 / N."""
        with tf.GradientTape() as tape:
            tape.watch(theta)
            loss, terms = self.loss_fn(theta, features, labels, context)
            # The gradients are not divided here: a division between the sum over devices and the
            # sum over microbatches would keep the compilers from moving the former out of the loop.
            share = loss if self.count == 1 else loss / self.count
        gradients = tape.gradient(share, theta)
        return loss, terms, gradients.Transform(self._annotate_gradient, self.weight_specs)

    def _loop(
        self, theta: NestedMap, microbatches: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """Returns the results of `gradients` for microbatches [N, B / N, ...]."""

        # Theta is an argument, since a function that captures it cannot be traced in another graph.
        def shares(i: tf.Tensor, theta: NestedMap) -> NestedMap:
            rows = microbatches.Transform(lambda stack: self._microbatch(stack, i))
            loss, terms, gradients = self._at_once(
                theta, rows.features, rows.labels, context.in_microbatch(i * _INDEX_STEP)
            )
            terms = NestedMap(terms, loss=loss)
            terms = terms.Transform(lambda value: tf.cast(value, tf.float32) / self.count)
            return NestedMap(terms=terms, gradients=gradients)

        # The loop needs the results' shapes beforehand; a microbatch is traced only once.
        weights = theta.Transform(lambda weight: tf.TensorSpec(weight.shape, weight.dtype))
        signature = [tf.TensorSpec((), tf.int32), weights]
        once = tf.function(shares, autograph=False, input_signature=signature)
        shapes = once.get_concrete_function().structured_outputs
        zeros = shapes.Transform(lambda share: tf.zeros(share.shape, share.dtype))

        def body(i: tf.Tensor, sums: NestedMap) -> tuple[tf.Tensor, NestedMap]:
            added = self._annotated(sums).Transform(tf.add, once(i, theta))
            return i + 1, self._annotated(added)

        _, totals = tf.while_loop(
            lambda i, _: i < self.count,
            body,
            (tf.constant(0), zeros),
            maximum_iterations=self.count,
        )
        return totals.terms.loss, totals.terms, totals.gradients

    def _annotated(self, result: NestedMap) -> NestedMap:
        """Annotates the gradients, which both ends of a loop's body need."""
        gradients = result.gradients.Transform(self._annotate_gradient, self.weight_specs)
        return NestedMap(result, gradients=gradients)

    def _annotate_gradient(self, gradient: Any, spec: WeightSpec) -> tf.Tensor:
        # The gradient of an embedding is tf.IndexedSlices.
        dense = tf.convert_to_tensor(gradient)
        annotator = self.annotator.in_stack(spec.stack)
        return annotator.annotate(dense, annotator.gradient_dims(spec.dims))

    def _divided(self, x: tf.Tensor) -> tf.Tensor:
        """Returns x [B, ...] as microbatches [N, B / N, ...]."""
        rows = x.shape[0]
        (partitions,) = self.annotator.factor("B")
        check(self.count, rows, partitions)

        # [D, N, rows of a partition's part, ...] to [N, D, ...]: a partition's parts stay with it.
        inner = x.shape[1:]
        rest = "_" * len(inner)
        by_partition = tf.reshape(x, [partitions, self.count, -1, *inner])
        by_partition = self.annotator.annotate(by_partition, f"B__{rest}")
        others = range(2, by_partition.shape.rank)
        by_microbatch = tf.transpose(by_partition, [1, 0, *others])
        by_microbatch = self.annotator.annotate(by_microbatch, f"_B_{rest}")
        return tf.reshape(by_microbatch, [self.count, rows // self.count, *inner])

    def _microbatch(self, stack: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        """Returns the rows of microbatch i, split like a batch's rows."""
        rows = tf.gather(stack, i)
        return self.annotator.annotate(rows, "B" + "_" * (rows.shape.rank - 1))
