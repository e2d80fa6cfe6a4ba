"""One block of layers applied R times, unrolled or in a loop, with or without rematerialization.

A block is a function (index, products, Carried) -> Carried. It takes x, the shared tensors and its
own weights, and returns the next x and its reports. It computes its products with large weights by
`products`. Only x, shared and weights have gradients; reports are small, and replicated over the
partitions.

In a loop, the weights and the reports of all blocks are stacks, whose first dim is R. So neither
the size of the program nor the time to compile it grows with R. A loop should be rematerialized:
otherwise it keeps stacks of all intermediates, which take more memory than unrolled layers do.

B batch, L length, M model; R blocks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Self, TypeVar

from lingvo_gshard.core.base_layer import RECOMPUTED, STACKED
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.context import Products, computed, recording, replaying
from lingvo_gshard.layers.slices import read_at, write_at
from lingvo_gshard.sharding.annotator import Annotator

Leaf = TypeVar("Leaf")
Tensors = Sequence["tf.Tensor"]


@dataclasses.dataclass(frozen=True)
class Carried(Generic[Leaf]):
    """What a block takes or returns, or the gradients of it, or its dims.

    A block takes `x`, `shared` and `weights` and returns `x` and `reports`; the other fields are
    empty. Where `weights` or `reports` are stacks, they are those of all blocks.
    """

    x: Leaf  # What a block hands on to the next one, such as activations [B, L, M].
    shared: Sequence[Leaf] = ()  # What all blocks see alike, such as the encoded source.
    weights: Sequence[Leaf] = ()  # Each block has its own.
    reports: Sequence[Leaf] = ()  # The statistics that a block returns beside x.

    def flat(self) -> list[Leaf]:
        """Returns all leaves in the order of the fields, for TensorFlow, which takes lists."""
        return [self.x, *self.shared, *self.weights, *self.reports]

    def packed(self, leaves: Iterable[Any]) -> Carried[Any]:
        """Returns this structure with other leaves, which are in the order of `flat`."""
        remaining = iter(leaves)

        def take(replaced: Sequence[Leaf]) -> list[Any]:
            return list(itertools.islice(remaining, len(replaced)))

        return Carried(
            x=next(remaining),
            shared=take(self.shared),
            weights=take(self.weights),
            reports=take(self.reports),
        )


Block = Callable[["int | tf.Tensor", Products, "Carried[tf.Tensor]"], "Carried[tf.Tensor]"]


class Layers(enum.Enum):
    """How a program applies the layers of a stack."""

    UNROLLED = "unrolled"  # one after the other, each with its own instructions
    LOOP = "loop"  # as one block in a while-loop over stacked weights


class Remat(enum.Enum):
    """What the backward pass recomputes to save memory (rematerialization, section 5.1)."""

    NONE = "none"
    BLOCK = "block"  # each block, from its input
    ALL_BUT_PRODUCTS = "all_but_products"  # as BLOCK, except the results of `products`


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor of a block, or a stack of those of all blocks, that the gradient needs.

    `dims` and `dtype` are those of a block's tensor as it was computed; it may be kept in another
    dtype.
    """

    tensor: tf.Tensor
    dims: str
    dtype: tf.DType

    @classmethod
    def of(cls, dims: str, tensor: tf.Tensor, hidden_dtype: str | None) -> Self:
        """Returns a tensor to be kept, in `hidden_dtype` if that is given and it is inside a layer.

        Hidden units, what goes to experts and back, and the heads' queries, keys and values have a
        dim H, E or D, and do not leave their layer. So the block computes the same inputs of each
        layer again, and chooses the same experts, whatever these are rounded to.
        """
        is_inside = any(letter in dims for letter in "HED")
        kept = tf.cast(tensor, hidden_dtype) if hidden_dtype and is_inside else tensor
        return cls(kept, dims, tensor.dtype)


def apply_block(
    block: Block,
    index: int,
    inputs: Carried[tf.Tensor],
    remat: Remat,
    hidden_dtype: str | None = None,
) -> Carried[tf.Tensor]:
    """Applies block `index` to its inputs; its gradient recomputes according to `remat`.

    `hidden_dtype` is that of Kept.of.
    """
    if remat is Remat.NONE:
        return block(index, computed, inputs)

    @tf.custom_gradient
    def once(*leaves: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        entered = inputs.packed(leaves)

        # Forward: keeps the inputs, and the results of products if `remat` says so.
        recorded: list[tuple[str, tf.Tensor]] = []
        products = recording(recorded) if remat is Remat.ALL_BUT_PRODUCTS else computed
        result = block(index, products, entered)
        kept = [Kept.of(dims, product, hidden_dtype) for dims, product in recorded]

        # Backward: the block again, with the kept results in place of its products.
        def gradient(*d_leaves: tf.Tensor) -> list[tf.Tensor]:
            kept_products = [tf.cast(each.tensor, each.dtype) for each in kept]
            again = replaying(kept_products) if kept_products else computed
            return _pull_back(
                functools.partial(block, index, again), entered, result.packed(d_leaves)
            ).flat()

        return result.flat(), gradient

    x, *reports = once(*inputs.flat())
    return Carried(x, reports=reports)


def _undivided(report: tf.Tensor) -> str:
    """Returns the dims of a report that is replicated over the partitions."""
    return "_" * report.shape.rank


@dataclasses.dataclass(frozen=True)
class Loop:
    """A block applied R times in one while-loop, and in a second one for the gradient."""

    block: Block
    num_blocks: int  # R.
    annotator: Annotator
    dims: Carried[str]  # Of what one block takes: x, shared and weights.
    stack_dim: str = STACKED  # The leading dim of stacks.
    report_dims: Callable[[tf.Tensor], str] = _undivided  # Returns the dims of one report.
    hidden_dtype: str | None = None  # That of Kept.of.
    # Whether to trace the body as a tf.function, which prunes operations without a use.
    as_function: bool = False

    def __call__(self, inputs: Carried[tf.Tensor], remat: Remat) -> Carried[tf.Tensor]:
        """Applies the block R times; the weights are stacks [R, ...].

        Returns the last x, and the reports as stacks [R, ...].
        """
        # TensorFlow's own gradient of the loop, which keeps stacks of all intermediates.
        if remat is Remat.NONE:
            result, _ = self._forward(inputs, remat)
            return result

        # A loop back over the blocks, of which each is computed again.
        @tf.custom_gradient
        def run(*leaves: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            entered = inputs.packed(leaves)
            result, kept = self._forward(entered, remat)

            def gradient(*d_leaves: tf.Tensor) -> list[tf.Tensor]:
                return self._backward(entered, kept, result.packed(d_leaves)).flat()

            return result.flat(), gradient

        x, *reports = run(*inputs.flat())
        return Carried(x, reports=reports)

    def _forward(
        self, inputs: Carried[tf.Tensor], remat: Remat
    ) -> tuple[Carried[tf.Tensor], list[Kept]]:
        """Applies the block R times; returns its result, and what the gradient needs."""
        # What one block keeps, known once it has been traced.
        traced: list[Kept] = []

        def keeping_block(
            index: int | tf.Tensor, entered: Carried[tf.Tensor]
        ) -> Carried[tf.Tensor]:
            """The block, with what it keeps as if that were its first reports."""
            recorded = [] if remat is Remat.NONE else [(self.dims.x, entered.x)]
            products = recording(recorded) if remat is Remat.ALL_BUT_PRODUCTS else computed
            result = self.block(index, products, entered)

            traced[:] = [Kept.of(dims, tensor, self.hidden_dtype) for dims, tensor in recorded]
            kept_tensors = [kept.tensor for kept in traced]
            return Carried(result.x, reports=[*kept_tensors, *result.reports])

        # What the loop carries: x, the stacks of weights, and the stacks of reports to be written.
        traced_reports = self._traced_reports(keeping_block, inputs)
        num_kept = len(traced)
        kept_dims = [kept.dims for kept in traced]
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
            weights = self._each_annotated([weight for _, weight in taken], self.dims.weights)

            result = keeping_block(i, Carried(carried.x, inputs.shared, weights))

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

        kept_stacks = zip(end.reports[:num_kept], traced, strict=True)
        kept = [dataclasses.replace(of_block, tensor=stack) for stack, of_block in kept_stacks]
        return Carried(end.x, reports=end.reports[num_kept:]), kept

    def _backward(
        self, inputs: Carried[tf.Tensor], kept: Sequence[Kept], d_result: Carried[tf.Tensor]
    ) -> Carried[tf.Tensor]:
        """Returns the gradients of the inputs, given those of the result.

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

            # What block i took, and the products that it kept.
            weights = [_weight(stack, i) for stack in inputs.weights]
            x, *kept_products = [
                tf.cast(self.annotator.annotate(_item(each.tensor, i), each.dims), each.dtype)
                for each in kept
            ]
            entered = self._annotated(Carried(x, inputs.shared, weights), self.dims)

            # The gradients of what it returned.
            d_reports = [_item(stack, i) for stack in d_result.reports]
            report_dims = [self.report_dims(d_report) for d_report in d_reports]
            d_reports = self._each_annotated(d_reports, report_dims)

            # The gradients of what it took.
            again = replaying(kept_products) if kept_products else computed
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

        # The gradient of a matrix is a product of activations, so it needs no more bits than they
        # have. (The router's does have more, and is rounded.) The gradients of all layers exist at
        # the same time and are half of what a deep model needs, so 16 bits halve a large part.
        unwritten = [
            tf.zeros(stack.shape, d_result.x.dtype if stack.shape.rank > 2 else stack.dtype)
            for stack in inputs.weights
        ]
        no_gradient = [tf.zeros_like(tensor) for tensor in inputs.shared]
        end = self._while(body, Carried(d_result.x, no_gradient, unwritten))

        # A gradient has the dtype of what it is a gradient of.
        pairs = zip(end.flat(), inputs.flat(), strict=True)
        return inputs.packed(tf.cast(gradient, tensor.dtype) for gradient, tensor in pairs)

    def _traced_reports(
        self,
        block: Callable[[int, Carried[tf.Tensor]], Carried[tf.Tensor]],
        inputs: Carried[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Traces one block outside of the program; returns its reports, for shapes and dtypes."""
        # A block takes one weight of each stack.
        specs = Carried(
            tf.TensorSpec(inputs.x.shape, inputs.x.dtype),
            [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs.shared],
            [tf.TensorSpec(stack.shape[1:], stack.dtype) for stack in inputs.weights],
        )

        @functools.partial(tf.function, autograph=False, input_signature=specs.flat())
        def traced(*leaves: tf.Tensor) -> list[tf.Tensor]:
            return block(0, specs.packed(leaves)).flat()

        _, *reports = traced.get_concrete_function().outputs
        return reports

    def _while(
        self,
        body: Callable[[tf.Tensor, Carried[tf.Tensor]], Carried[tf.Tensor]],
        start: Carried[tf.Tensor],
    ) -> Carried[tf.Tensor]:
        """Applies body(i, carried) for i from 0 to R - 1; returns what is carried in the end."""

        def step(i: tf.Tensor, *leaves: tf.Tensor) -> list[tf.Tensor]:
            return body(i, start.packed(leaves)).flat()

        # TensorFlow's loop carries a list, whose first element is i.
        applied = tf.function(step, autograph=False) if self.as_function else step
        _, *leaves = tf.while_loop(
            lambda i, *_: i < self.num_blocks,
            lambda i, *leaves: [i + 1, *applied(i, *leaves)],
            [tf.constant(0), *start.flat()],
            maximum_iterations=self.num_blocks,
        )
        return start.packed(leaves)

    def _annotated(self, carried: Carried[tf.Tensor], dims: Carried[str]) -> Carried[tf.Tensor]:
        return carried.packed(self._each_annotated(carried.flat(), dims.flat()))

    def _each_annotated(self, tensors: Tensors, dims: Sequence[str]) -> list[tf.Tensor]:
        return [
            self.annotator.annotate(tensor, tensor_dims)
            for tensor, tensor_dims in zip(tensors, dims, strict=True)
        ]


def _pull_back(
    fn: Callable[[Carried[tf.Tensor]], Carried[tf.Tensor]],
    inputs: Carried[tf.Tensor],
    d_result: Carried[tf.Tensor],
) -> Carried[tf.Tensor]:
    """Returns the gradients of the inputs, given those of fn(inputs), which is computed again.

    What is computed again is in the scope RECOMPUTED, and its gradients are not.
    """
    # Without the barrier the compiler would reuse the forward pass's results, and so keep them.
    held = xla.optimization_barrier(*inputs.flat(), *d_result.flat())
    num_inputs = len(inputs.flat())
    d_result = d_result.packed(held[num_inputs:])
    leaves = held[:num_inputs]

    with tf.GradientTape() as tape:
        tape.watch(leaves)
        with tf.name_scope(f"{RECOMPUTED}/"):  # The slash makes it the outermost scope.
            results = fn(inputs.packed(leaves)).flat()
    gradients = tape.gradient(results, leaves, d_result.flat(), unconnected_gradients="zero")
    # The gradient of a weight whose rows were gathered is tf.IndexedSlices.
    gradients = list(map(tf.convert_to_tensor, gradients))
    return inputs.packed(gradients)


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
