"""One block of layers applied R times, unrolled or in a loop, with or without rematerialization.

A block is a function (index, numerics, Carried) -> Carried. It takes x, the shared tensors and its
own weights, and returns the next x and its reports. Its layers multiply by `numerics`, which keeps
some products for the gradient. Only x, shared and weights have gradients; reports are small, and
replicated over the partitions.

In a loop, the weights and the reports of all blocks are stacks, whose first dim is R. So neither
the size of the program nor the time to compile it grows with R. A loop should be rematerialized:
otherwise it keeps stacks of all intermediates, which take more memory than unrolled layers do.

B batch, L length, M model; R blocks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from lingvo_gshard.core.base_layer import RECOMPUTED, STACKED
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.numerics import Numerics, Remat
from lingvo_gshard.layers.slices import read_at, write_at
from lingvo_gshard.sharding.annotator import Annotator

Leaf = TypeVar("Leaf")
Tensors = Sequence["tf.Tensor"]


class Carried(NamedTuple, Generic[Leaf]):
    """The inputs or the results of a block, or their gradients, or their dims: a tree of tf.nest.

    A block takes `x`, `shared` and `weights` and returns `x` and `reports`; the other fields are
    empty. Where `weights` or `reports` are stacks, these hold the tensors of all blocks.
    """

    x: Leaf  # A block hands it on to the next one: activations [B, L, M].
    shared: Sequence[Leaf] = ()  # All blocks see the same, such as the encoded source.
    weights: Sequence[Leaf] = ()  # Each block has its own.
    reports: Sequence[Leaf] = ()  # The statistics that a block returns beside x.


Block = Callable[["int | tf.Tensor", Numerics, "Carried[tf.Tensor]"], "Carried[tf.Tensor]"]


class Layers(enum.Enum):
    """How a program applies the layers of a stack."""

    UNROLLED = "unrolled"  # one after the other, each with its own instructions
    LOOP = "loop"  # as one block in a while-loop over stacked weights


def unrolled(
    block: Block, index: int, numerics: Numerics
) -> Callable[[Carried[tf.Tensor]], Carried[tf.Tensor]]:
    """Returns block `index` as a function of its inputs; its gradient follows numerics.remat."""
    if numerics.remat is Remat.NONE:
        return functools.partial(block, index, numerics)
    return functools.partial(_rematerialized, block, index, numerics)


def _rematerialized(
    block: Block, index: int, numerics: Numerics, inputs: Carried[tf.Tensor]
) -> Carried[tf.Tensor]:
    """Applies a block to its inputs; its gradient computes it again."""

    @tf.custom_gradient
    def once(entered: Carried[tf.Tensor]) -> tuple[Carried[tf.Tensor], Callable[..., Any]]:
        # Forward: keeps the inputs, and the products that `numerics` keeps.
        kept: list[tuple[str, tf.Tensor]] = []
        result = block(index, numerics.keeping(kept), entered)

        # Backward: the block again, with these in place of its own products.
        def gradient(*d_leaves: tf.Tensor) -> list[tf.Tensor]:
            again = functools.partial(block, index, numerics.replaying(t for _, t in kept))
            d_result = tf.nest.pack_sequence_as(result, d_leaves)
            return tf.nest.flatten(_pull_back(again, entered, d_result))

        return result, gradient

    return once(inputs)


def _undivided(report: tf.Tensor) -> str:
    """Returns the dims of a report that is replicated over the partitions."""
    return "_" * report.shape.rank


@dataclasses.dataclass(frozen=True)
class Loop:
    """A block applied R times in one while-loop, and in a second one for the gradient."""

    block: Block
    num_blocks: int  # R.
    annotator: Annotator
    dims: Carried[str]  # The dims of a block's inputs: x, shared and weights.
    # Whether the gradient of each weight is a product of activations, as a matrix's is.
    are_products: Sequence[bool]
    numerics: Numerics
    stack_dim: str = STACKED  # The leading dim of stacks.
    report_dims: Callable[[tf.Tensor], str] = _undivided  # Returns the dims of one report.
    # Whether to trace the body as a tf.function, which prunes operations without a use.
    as_function: bool = False

    def __call__(self, inputs: Carried[tf.Tensor]) -> Carried[tf.Tensor]:
        """Applies the block R times; the weights are stacks [R, ...].

        Returns the last x, and the reports as stacks [R, ...].
        """
        # TensorFlow's own gradient of the loop, which keeps stacks of all intermediates.
        if self.numerics.remat is Remat.NONE:
            result, _, _ = self._forward(inputs)
            return result

        # A loop back over the blocks, of which each is computed again.
        @tf.custom_gradient
        def run(entered: Carried[tf.Tensor]) -> tuple[Carried[tf.Tensor], Callable[..., Any]]:
            result, kept, kept_dims = self._forward(entered)

            def gradient(*d_leaves: tf.Tensor) -> list[tf.Tensor]:
                d_result = tf.nest.pack_sequence_as(result, d_leaves)
                return tf.nest.flatten(self._backward(entered, kept, kept_dims, d_result))

            return result, gradient

        return run(inputs)

    def _forward(
        self, inputs: Carried[tf.Tensor]
    ) -> tuple[Carried[tf.Tensor], list[tf.Tensor], list[str]]:
        """Applies the block R times.

        Returns its result, the stacks [R, ...] that the gradient needs, and the dims of their
        elements.
        """
        numerics = self.numerics.in_loop(self.num_blocks)
        kept_dims: list[str] = []  # Known once a block has been traced.

        def keeping_block(
            numerics: Numerics, index: int | tf.Tensor, entered: Carried[tf.Tensor]
        ) -> Carried[tf.Tensor]:
            """The block, with the tensors that it keeps as its first reports."""
            kept: list[tuple[str, tf.Tensor]] = []
            if numerics.remat is not Remat.NONE:
                kept.append((self.dims.x, entered.x))
                numerics = numerics.keeping(kept)
            result = self.block(index, numerics, entered)

            kept_dims[:] = [dims for dims, _ in kept]
            kept_tensors = [tensor for _, tensor in kept]
            return Carried(result.x, reports=[*kept_tensors, *result.reports])

        # The loop carries x, the stacks of weights, and the stacks of reports to be written.
        beside = functools.partial(keeping_block, numerics.unrecorded())
        traced_reports = self._traced_reports(beside, inputs)
        num_kept = len(kept_dims)
        own_dims = [self.report_dims(report) for report in traced_reports[num_kept:]]
        carried_dims = Carried(
            self.dims.x,
            weights=[self.stack_dim + dims for dims in self.dims.weights],
            reports=[self.stack_dim + dims for dims in [*kept_dims, *own_dims]],
        )

        def body(i: tf.Tensor, carried: Carried[tf.Tensor]) -> Carried[tf.Tensor]:
            carried = self._annotated(carried, carried_dims)

            # Each stack is handed on to the next iteration, and gives this one its weight.
            taken = [_take(stack, i) for stack in carried.weights]
            stacks = [stack for stack, _ in taken]
            weights = self._annotated([weight for _, weight in taken], self.dims.weights)

            result = keeping_block(numerics, i, Carried(carried.x, inputs.shared, weights))

            # Its reports become item i of their stacks.
            reports = [
                _put(stack, i, report)
                for stack, report in zip(carried.reports, result.reports, strict=True)
            ]
            carried = Carried(result.x, weights=stacks, reports=reports)
            return self._annotated(carried, carried_dims)

        # From x and stacks of reports without any yet.
        unwritten = [tf.zeros([self.num_blocks, *t.shape], t.dtype) for t in traced_reports]
        start = Carried(inputs.x, weights=inputs.weights, reports=unwritten)
        end = self._while(body, start)

        reports = end.reports[num_kept:]
        return Carried(end.x, reports=reports), list(end.reports[:num_kept]), kept_dims

    def _backward(
        self,
        inputs: Carried[tf.Tensor],
        kept: Tensors,
        kept_dims: Sequence[str],
        d_result: Carried[tf.Tensor],
    ) -> Carried[tf.Tensor]:
        """Returns the gradients of the inputs, given what `_forward` kept and the result's.

        Iteration k pulls the gradients back through block R - 1 - k. The loop carries the gradient
        of the block's output, the sums of the gradients of the shared tensors, and the gradients
        of the stacks of weights, into which each block writes its own.
        """
        gradient_dims = self.annotator.gradient_dims
        stack_dims = [self.stack_dim + dims for dims in self.dims.weights]
        d_block_dims = Carried(
            self.dims.x, self.dims.shared, [gradient_dims(dims) for dims in self.dims.weights]
        )
        d_dims = Carried(
            self.dims.x, self.dims.shared, [gradient_dims(dims) for dims in stack_dims]
        )

        def body(k: tf.Tensor, carried: Carried[tf.Tensor]) -> Carried[tf.Tensor]:
            i = self.num_blocks - 1 - k
            carried = self._annotated(carried, d_dims)

            # The inputs of block i, and the products that it kept.
            weights = [_weight(stack, i) for stack in inputs.weights]
            items = [_item(stack, i) for stack in kept]
            x, *kept_products = self._annotated(items, kept_dims)
            entered = self._annotated(Carried(x, inputs.shared, weights), self.dims)

            # The gradients of its results.
            d_reports = [_item(stack, i) for stack in d_result.reports]
            report_dims = [self.report_dims(d_report) for d_report in d_reports]
            d_reports = self._annotated(d_reports, report_dims)

            # The gradients of its inputs.
            again = self.numerics.replaying(kept_products)
            d_block = _pull_back(
                functools.partial(self.block, i, again),
                entered,
                Carried(carried.x, reports=d_reports),
            )
            d_block = self._annotated(d_block, d_block_dims)

            # All blocks took the same shared tensors, but each its own weights.
            d_shared = [
                total + own for total, own in zip(carried.shared, d_block.shared, strict=True)
            ]
            d_stacks = [
                _replaced(d_stack, i, tf.cast(d_weight, d_stack.dtype))
                for d_stack, d_weight in zip(carried.weights, d_block.weights, strict=True)
            ]
            return self._annotated(Carried(d_block.x, d_shared, d_stacks), d_dims)

        # The gradient of a matrix is a product of activations, so more bits than theirs would add
        # nothing. (The router's has more, and is rounded.) The gradients of all layers exist at the
        # same time and take half of a deep model's memory, so 16 bits halve a large part.
        # Those of biases and scales are sums over all tokens, and small: they keep their bits.
        unwritten = [
            tf.zeros(stack.shape, d_result.x.dtype if is_product else stack.dtype)
            for stack, is_product in zip(inputs.weights, self.are_products, strict=True)
        ]
        no_gradient = [tf.zeros_like(tensor) for tensor in inputs.shared]
        end = self._while(body, Carried(d_result.x, no_gradient, unwritten))

        # A gradient has the dtype of its tensor.
        return tf.nest.map_structure(
            lambda gradient, tensor: tf.cast(gradient, tensor.dtype), end, inputs, check_types=False
        )

    def _traced_reports(
        self,
        block: Callable[[int, Carried[tf.Tensor]], Carried[tf.Tensor]],
        inputs: Carried[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Traces one block outside of the program; returns its reports, for shapes and dtypes."""
        # A block takes one weight of each stack.
        specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
        weights = [tf.TensorSpec(stack.shape[1:], stack.dtype) for stack in specs.weights]
        specs = specs._replace(weights=weights)
        first = functools.partial(block, 0)
        traced = tf.function(first, autograph=False, input_signature=[specs])
        return list(traced.get_concrete_function().structured_outputs.reports)

    def _while(
        self,
        body: Callable[[tf.Tensor, Carried[tf.Tensor]], Carried[tf.Tensor]],
        start: Carried[tf.Tensor],
    ) -> Carried[tf.Tensor]:
        """Applies body(i, carried) for i from 0 to R - 1; returns the last result."""
        step = tf.function(body, autograph=False) if self.as_function else body
        _, end = tf.while_loop(
            lambda i, _: i < self.num_blocks,
            lambda i, carried: (i + 1, step(i, carried)),
            (tf.constant(0), start),
            maximum_iterations=self.num_blocks,
        )
        return end

    def _annotated(self, tensors: Any, dims: Any) -> Any:
        """Returns a tree of tensors, annotated by a tree of dims; tuples may stand for lists."""
        return tf.nest.map_structure(self.annotator.annotate, tensors, dims, check_types=False)


def _pull_back(
    fn: Callable[[Carried[tf.Tensor]], Carried[tf.Tensor]],
    inputs: Carried[tf.Tensor],
    d_result: Carried[tf.Tensor],
) -> Carried[tf.Tensor]:
    """Returns the gradients of the inputs from the result's; fn(inputs) is computed again.

    The repeated operations are in the scope RECOMPUTED, and their gradients are not.
    """
    # Without the barrier the compiler would reuse the forward pass's results, and so keep them.
    leaves = tf.nest.flatten((inputs, d_result))
    held = xla.optimization_barrier(*leaves)
    inputs, d_result = tf.nest.pack_sequence_as((inputs, d_result), held)

    with tf.GradientTape() as tape:
        tape.watch(inputs)
        with tf.name_scope(f"{RECOMPUTED}/"):  # The slash makes it the outermost scope.
            result = fn(inputs)
    gradients = tape.gradient(result, inputs, d_result, unconnected_gradients="zero")
    # The gradient of a weight whose rows were gathered is tf.IndexedSlices.
    return tf.nest.map_structure(tf.convert_to_tensor, gradients)


def _take(stack: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (stack, weight i), for a loop that carries the stack and takes each weight once.

    The gradient of a weight is then written into the stack's gradient. The gradient of an
    ordinary slice would be a whole stack of zeros, added at every iteration.
    """

    @tf.custom_gradient
    def both(stack: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        def gradient(d_stack: tf.Tensor, d_weight: tf.Tensor) -> tf.Tensor:
            return _replaced(d_stack, i, d_weight)

        return (stack, _weight(stack, i)), gradient

    return both(stack)


def _put(stack: tf.Tensor, i: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
    """Returns the stack with `item` at i, for a loop that carries it and writes each item once."""

    @tf.custom_gradient
    def written(
        stack: tf.Tensor, item: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
        def gradient(d_stack: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return d_stack, _item(d_stack, i)

        return _replaced(stack, i, item), gradient

    return written(stack, item)


def _weight(stack: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    """Returns weight i of a stack, without a second copy of the stack in bfloat16.

    A TPU multiplies matrices in bfloat16. Where a loop does nothing else with its weights, the
    compiler converts the whole stack before the loop and keeps it beside the float32 one that the
    optimizer needs. Multiplying by a float32 one that the compiler can't see through prevents it.
    """
    (one,) = xla.optimization_barrier(tf.ones([], stack.dtype))
    return one * _item(stack, i)


def _item(stack: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    return read_at(stack, i, 1)[0]


def _replaced(stack: tf.Tensor, i: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
    return write_at(stack, item[None], i, axis=0)
