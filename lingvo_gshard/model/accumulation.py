"""A batch's loss and gradients, at once or as the sum over its microbatches, in a loop.

With N microbatches, activations exist for one of them at a time, and the gradients are those of the
whole batch to rounding. The batch's loss is the mean of theirs,

    L = 1/n * sum over tokens of l_nll + k * l_aux = 1/N * sum_i L_i
    L_i = N/n * sum over microbatch i's tokens of l_nll + k * l_aux_i

where n is the number of tokens of the whole batch: a token weighs the same in whichever microbatch
it is. l_aux is a mean over groups, of which all microbatches have as many.

Each device cuts its own rows into N parts, so that no row moves. Experts' groups lie within a
microbatch; they are those of the whole batch if a device's part holds whole groups.

Nothing in the loop needs the sum of a weight's gradient over the devices. The compilers for TPUs
and GPUs see that it is only added to those before, and sum most of them once, after the loop. They
do not see through a loop over layers, nor does the compiler for CPUs: there, every microbatch has
sums of its own.

N microbatches, B batch, D partitions of its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.base_layer import WeightSpec
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context
from lingvo_gshard.sharding.annotator import Annotator

# (theta, features, labels, context) -> (loss, metrics), as a task's Loss.
LossFn = Callable[[NestedMap, NestedMap, NestedMap, Context], "tuple[tf.Tensor, NestedMap]"]

# Microbatches of a pipeline draw the random numbers of the indices below this one.
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
    """Computes a batch's gradients in `count` microbatches, N; with 1, of the batch at once."""

    loss_fn: LossFn
    num_tokens: Callable[[NestedMap], tf.Tensor]  # Over which the loss is a mean, by the labels.
    weight_specs: NestedMap  # WeightSpecs.
    annotator: Annotator
    count: int

    def __call__(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """Returns the loss, its metrics and its gradients, annotated as Annotator.gradient_dims.

        The metrics of N microbatches are means, as a pipeline's reports are. Counts, whose names
        begin with `num_`, are sums. A mean over tokens is that of the whole batch, as the
        loss is. Raises ValueError if N does not divide the rows that a partition has.
        """
        if self.count == 1:
            return self._at_once(theta, features, labels, context)

        # Each token's share of the mean does not depend on the microbatch that it is in.
        num_tokens = self.num_tokens(labels)
        mean_tokens = tf.maximum(num_tokens, 1.0) / self.count
        context = dataclasses.replace(context, mean_tokens=mean_tokens)
        whole = NestedMap(features=features, labels=labels)
        microbatches = whole.Transform(self._divided)

        loss, metrics, gradients = self._loop(theta, microbatches, context)
        # Counts are sums over the microbatches, all other metrics means.
        for name in metrics:
            if name.startswith("num_"):
                metrics[name] *= self.count
        return loss, metrics, gradients

    def _at_once(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """Returns the loss of some rows, its metrics, and the gradients of its share, 1 / N."""
        weights = theta.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss, metrics = self.loss_fn(theta, features, labels, context)
            # Not the gradients: between a sum over devices and that over microbatches, a division
            # would keep the compilers from moving the former out of the loop.
            share = loss if self.count == 1 else loss / self.count
        gradients = self.weight_specs.Pack(tape.gradient(share, weights))
        return loss, metrics, gradients.Transform(self._annotate_gradient, self.weight_specs)

    def _loop(
        self, theta: NestedMap, microbatches: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap, NestedMap]:
        """Returns the mean loss of the microbatches, [N, B / N, ...], and as `__call__`."""
        results: list[NestedMap] = []

        # Theta is an argument, since a function that captured it could be traced in no other graph.
        def flat_terms(i: tf.Tensor, *leaves: tf.Tensor) -> list[tf.Tensor]:
            rows = microbatches.Transform(lambda stack: self._microbatch(stack, i))
            loss, metrics, gradients = self._at_once(
                theta.Pack(leaves),
                rows.features,
                rows.labels,
                context.in_microbatch(i * _INDEX_STEP),
            )
            metrics = NestedMap(metrics, loss=loss)
            metrics = metrics.Transform(lambda value: tf.cast(value, tf.float32) / self.count)
            result = NestedMap(metrics=metrics, gradients=gradients)
            results.append(result)
            return result.Flatten()

        # The loop needs the results' shapes beforehand; a microbatch is traced only once.
        weights = theta.Flatten()
        signature = [tf.TensorSpec((), tf.int32)]
        signature += [tf.TensorSpec(weight.shape, weight.dtype) for weight in weights]
        terms_of = tf.function(flat_terms, autograph=False, input_signature=signature)
        shapes = terms_of.get_concrete_function().outputs
        result = results[0]

        def body(i: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
            totals = self._annotated(result.Pack(sums))
            terms = result.Pack(terms_of(i, *weights))
            added = self._annotated(totals.Transform(tf.add, terms))
            return [i + 1, *added.Flatten()]

        _, *sums = tf.while_loop(
            lambda i, *_: i < self.count,
            body,
            [tf.constant(0), *(tf.zeros(term.shape, term.dtype) for term in shapes)],
            maximum_iterations=self.count,
        )
        totals = result.Pack(sums)
        return totals.metrics.loss, totals.metrics, totals.gradients

    def _annotated(self, result: NestedMap) -> NestedMap:
        """Annotates the gradients, as both ends of a loop's body need it."""
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
        """Returns the rows of microbatch i, split as a batch's are."""
        rows = tf.gather(stack, i)
        return self.annotator.annotate(rows, "B" + "_" * (rows.shape.rank - 1))
