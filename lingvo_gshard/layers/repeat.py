"""One block of layers applied R times, unrolled or in a loop, with or without rematerialization.

A block is a function of tensors, (index, products, x, *shared, *weights) -> [x, *reports]. It
computes its products with large weights by `products`. Each block takes the x of the one before;
all blocks see the same `shared` tensors, and each has its own weights. Reports are small and
replicated over the partitions. Only x, shared and weights have gradients.

In a loop, the weights and the reports of all blocks are stacks, whose first dim is R. So neither
the size of the program nor the time to compile it grows with R. A loop should be rematerialized:
otherwise it keeps stacks of all intermediates, which take more memory than unrolled layers do.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence

from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.core.late import tf, xla
from lingvo_gshard.layers.context import computed, recording, replaying
from lingvo_gshard.layers.slices import read_at, write_at
from lingvo_gshard.sharding.annotator import Annotator

Tensors = Sequence["tf.Tensor"]
Block = Callable[..., "list[tf.Tensor]"]


class Layers(enum.Enum):
    """How a program applies the layers of a stack."""

    UNROLLED = "unrolled"  # one after the other, each with its own instructions
    LOOP = "loop"  # as one block in a while-loop over stacked weights


class Remat(enum.Enum):
    """What the backward pass recomputes to save memory (rematerialization)."""

    NONE = "none"
    BLOCK = "block"  # each block, from its input
    ALL_BUT_PRODUCTS = "all_but_products"  # as BLOCK, except the results of `products`


def recomputed(block: Block, remat: Remat) -> Callable[..., list[tf.Tensor]]:
    """A block at its index, without `products`; its gradient recomputes according to `remat`."""
    if remat is Remat.NONE:
        return functools.partial(block, computed)

    @tf.custom_gradient
    def once(*args: tf.Tensor):
        kept: list[tuple[str, tf.Tensor]] = []
        products = recording(kept) if remat is Remat.ALL_BUT_PRODUCTS else computed
        results = block(products, *args)

        def gradient(*d_results: tf.Tensor) -> list[tf.Tensor]:
            again = replaying([result for _, result in kept]) if kept else computed
            return _pull_back(functools.partial(block, again), args, d_results)

        return results, gradient

    return once


@dataclasses.dataclass(frozen=True)
class Loop:
    """A block applied R times in one while-loop, and in a second one for the gradient."""

    block: Block
    num_blocks: int
    annotator: Annotator
    x_dims: str
    shared_dims: Sequence[str]  # Of each shared tensor.
    weight_dims: Sequence[str]  # Of each weight of one block.
    stack_dim: str = STACKED  # The leading dim of stacks.
    # Gives the dims of one report.
    report_dims: Callable[[tf.Tensor], str] = lambda x: "_" * x.shape.rank
    # Whether a body is a function, where TensorFlow drops what is unused.
    as_function: bool = False

    def __call__(
        self, x: tf.Tensor, shared: Tensors, stacks: Tensors, remat: Remat
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Applies the block R times, from x; returns the last x, and the reports, each [R, ...]."""
        if remat is Remat.NONE:
            y, _, reports = self._forward(x, shared, stacks, remat)
            return y, reports

        @tf.custom_gradient
        def run(x: tf.Tensor, *rest: tf.Tensor):
            shared, stacks = rest[: len(self.shared_dims)], rest[len(self.shared_dims) :]
            y, kept, reports = self._forward(x, shared, stacks, remat)

            def gradient(d_y: tf.Tensor, *d_reports: tf.Tensor) -> list[tf.Tensor]:
                return self._backward(kept, shared, stacks, d_y, d_reports)

            return [y, *reports], gradient

        y, *reports = run(x, *shared, *stacks)
        return y, reports

    def _forward(
        self, x: tf.Tensor, shared: Tensors, stacks: Tensors, remat: Remat
    ) -> tuple[tf.Tensor, list[tuple[tf.Tensor, str]], list[tf.Tensor]]:
        """Applies the block R times; returns x, and stacks of kept tensors with dims and reports.

        The tensors that the gradient needs are kept as if they were each block's first reports.
        """
        kept_dims: list[str] = []

        def keeping(index: tf.Tensor, x: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
            kept = [] if remat is Remat.NONE else [(self.x_dims, x)]
            products = recording(kept) if remat is Remat.ALL_BUT_PRODUCTS else computed
            y, *reports = self.block(index, products, x, *rest)
            kept_dims[:] = [dims for dims, _ in kept]
            return [y, *(tensor for _, tensor in kept), *reports]

        traced = self._traced_reports(keeping, x, shared, stacks)
        report_dims = map(self.report_dims, traced[len(kept_dims) :])
        stacked = [*self.weight_dims, *kept_dims, *report_dims]
        dims = [self.x_dims, *(self.stack_dim + each for each in stacked)]

        def body(i: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
            x, *rest = self._annotated(carried, dims)
            taken = [_take(stack, i) for stack in rest[: len(stacks)]]
            weights = self._annotated([weight for _, weight in taken], self.weight_dims)
            x, *new = keeping(i, x, *shared, *weights)
            put = [_put(stack, i, r) for stack, r in zip(rest[len(stacks) :], new, strict=True)]
            return self._annotated([x, *(stack for stack, _ in taken), *put], dims)

        empty = [tf.zeros([self.num_blocks, *t.shape], t.dtype) for t in traced]
        x, *rest = self._while(body, [x, *stacks, *empty])
        made = rest[len(stacks) :]
        return x, list(zip(made, kept_dims, strict=False)), made[len(kept_dims) :]

    def _backward(
        self,
        kept: Sequence[tuple[tf.Tensor, str]],
        shared: Tensors,
        stacks: Tensors,
        d_y: tf.Tensor,
        d_reports: Tensors,
    ) -> list[tf.Tensor]:
        """Gradients of x, shared and stacks, given the stacks of kept tensors with their dims."""
        others, n = [self.x_dims, *self.shared_dims], len(shared)
        gradient_dims = self.annotator.gradient_dims
        d_one = [*others, *map(gradient_dims, self.weight_dims)]
        d_all = [*others, *(gradient_dims(self.stack_dim + dims) for dims in self.weight_dims)]

        def body(k: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
            i = self.num_blocks - 1 - k
            d_x, *sums = self._annotated(carried, d_all)
            weights = [_weight(stack, i) for stack in stacks]
            x, *products = (self.annotator.annotate(_item(stack, i), d) for stack, d in kept)
            args = self._annotated([x, *shared, *weights], [*others, *self.weight_dims])
            d_items = [_item(stack, i) for stack in d_reports]
            d_results = [d_x, *self._annotated(d_items, list(map(self.report_dims, d_items)))]
            again = replaying(products) if products else computed
            d_args = _pull_back(functools.partial(self.block, i, again), args, d_results)
            d_x, *new = self._annotated(d_args, d_one)
            d_shared = [a + b for a, b in zip(sums[:n], new[:n], strict=True)]
            d_stacks = [
                _replaced(s, i, tf.cast(d, s.dtype)) for s, d in zip(sums[n:], new[n:], strict=True)
            ]
            return self._annotated([d_x, *d_shared, *d_stacks], d_all)

        # The gradient of a matrix is a product of activations, so it needs no more bits than they
        # have. (The router's does have more, and is rounded.) The gradients of all layers exist at
        # the same time and are half of what a deep model needs, so 16 bits halve a large part.
        empty = [tf.zeros(s.shape, d_y.dtype if s.shape.rank > 2 else s.dtype) for s in stacks]
        sums = self._while(body, [d_y, *map(tf.zeros_like, shared), *empty])
        args = [d_y, *shared, *stacks]
        return [tf.cast(d, arg.dtype) for d, arg in zip(sums, args, strict=True)]

    def _traced_reports(
        self, block: Callable[..., list[tf.Tensor]], x: tf.Tensor, shared: Tensors, stacks: Tensors
    ) -> list[tf.Tensor]:
        """One block's reports in a trace that is not part of the program, for shapes and dtypes."""
        args = [tf.TensorSpec(t.shape, t.dtype) for t in [x, *shared]]
        args += [tf.TensorSpec(t.shape[1:], t.dtype) for t in stacks]
        traced = tf.function(functools.partial(block, 0), autograph=False, input_signature=args)
        return traced.get_concrete_function().outputs[1:]

    def _while(self, body: Callable[..., list[tf.Tensor]], start: Tensors) -> list[tf.Tensor]:
        if self.as_function:
            body = tf.function(body, autograph=False)
        _, *carried = tf.while_loop(
            lambda k, *_: k < self.num_blocks,
            lambda k, *carried: [k + 1, *body(k, *carried)],
            [tf.constant(0), *start],
            maximum_iterations=self.num_blocks,
        )
        return carried

    def _annotated(self, tensors: Tensors, dims: Sequence[str]) -> list[tf.Tensor]:
        return [self.annotator.annotate(tensor, d) for tensor, d in zip(tensors, dims, strict=True)]


def _pull_back(
    fn: Callable[..., list[tf.Tensor]], args: Tensors, d_results: Tensors
) -> list[tf.Tensor]:
    """Gradients of args, given those of fn(*args), which is computed again."""
    # Without the barrier the compiler would reuse the forward pass's results, and so keep them.
    held = xla.optimization_barrier(*args, *d_results)
    args, d_results = held[: len(args)], held[len(args) :]
    with tf.GradientTape() as tape:
        tape.watch(args)
        results = fn(*args)
    return tape.gradient(results, args, d_results, unconnected_gradients="zero")


def _take(stack: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(stack, weight i), for a loop that carries the stack and takes each weight once.

    The gradient of a weight is then written into the stack's gradient. The gradient of an
    ordinary slice would be a whole stack of zeros, added at every iteration.
    """

    @tf.custom_gradient
    def both(stack: tf.Tensor):
        return (stack, _weight(stack, i)), lambda d_stack, d_item: _replaced(d_stack, i, d_item)

    return both(stack)


def _put(stack: tf.Tensor, i: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
    """The stack with `item` at index i, for a loop that carries it and writes each item once."""

    @tf.custom_gradient
    def written(stack: tf.Tensor, item: tf.Tensor):
        return _replaced(stack, i, item), lambda d_stack: (d_stack, _item(d_stack, i))

    return written(stack, item)


def _weight(stack: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    """Weight i of a stack, without a second copy of the stack in bfloat16.

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
