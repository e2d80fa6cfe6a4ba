"""One block of layers, applied R times: unrolled or as a loop, its intermediates kept or not.

A block is a function of tensors, (products, index, x, *shared, *weights) -> [x, *reports]: it asks
`products` for those with large weights, `x` goes from block to block, all blocks see the `shared`
tensors, each has its own weights, and its reports are small tensors that every partition has
whole. Only x, shared and weights have gradients.

In a loop, the weights and reports of all blocks are stacks: their first dim is R. The program's
size, and with it the time to compile it, does not grow with R. A loop is meant to be recomputed:
else it keeps stacks of every intermediate, more than what unrolled layers keep.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from lingvo_gshard.core.base_layer import STACKED, Annotator
from lingvo_gshard.layers.products import Products, Recorded, Replayed, computed

Tensors = Sequence[tf.Tensor]
Block = Callable[..., list[tf.Tensor]]


class Layers(enum.Enum):
    """How a program holds equal layers."""

    UNROLLED = "unrolled"  # one after the other
    LOOP = "loop"  # once, in a while-loop over stacked weights


class Remat(enum.Enum):
    """What the backward pass computes again to save memory (rematerialization)."""

    NONE = "none"
    BLOCK = "block"  # each block, from its input
    ALL_BUT_PRODUCTS = "all_but_products"  # the same, but for what it asks `products` for


def recomputed(block: Block, remat: Remat) -> Callable[..., list[tf.Tensor]]:
    """`block` of all but `products`, whose gradient computes again what `remat` says."""
    if remat is Remat.NONE:
        return functools.partial(block, computed)

    @tf.custom_gradient
    def once(*args: tf.Tensor):
        recorded = Recorded()
        results = block(recorded, *args)
        kept = [result for _, result in recorded.results if remat is Remat.ALL_BUT_PRODUCTS]

        def gradient(*d_results: tf.Tensor) -> list[tf.Tensor]:
            return _pull_back(functools.partial(block, _replayed(kept)), args, d_results)

        return results, gradient

    return once


def _replayed(kept: Tensors) -> Products:
    return Replayed(kept) if kept else computed


class _Keeping:
    """A block in a loop that reports, before all else, what its gradient shall find.

    Attributes:
      kept_dims: of each tensor that is kept; known once the block has been traced.
    """

    def __init__(self, block: Block, x_dims: str, remat: Remat) -> None:
        self.kept_dims: list[str] = []
        self._block, self._x_dims, self._remat = block, x_dims, remat

    def __call__(self, index: tf.Tensor, x: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
        recorded = Recorded()
        y, *reports = self._block(recorded, index, x, *rest)
        kept = [] if self._remat is Remat.NONE else [(self._x_dims, x)]
        kept += recorded.results if self._remat is Remat.ALL_BUT_PRODUCTS else []
        self.kept_dims = [dims for dims, _ in kept]
        return [y, *(tensor for _, tensor in kept), *reports]


class Loop:
    """A block applied R times in one while-loop, and in a second one for the gradient."""

    def __init__(
        self,
        block: Block,
        num_blocks: int,
        annotator: Annotator,
        *,
        x_dims: str,
        shared_dims: Sequence[str],
        weight_dims: Sequence[str],
    ) -> None:
        """Args:
        block: see the module.
        num_blocks: R.
        annotator: the experiment's.
        x_dims: of `x`.
        shared_dims: of each shared tensor.
        weight_dims: of each weight of one block.
        """
        self._block, self._num_blocks, self._annotate = block, num_blocks, annotator.annotate
        self._x_dims, self._shared_dims, self._weight_dims = x_dims, shared_dims, weight_dims
        self._stack_dims = [STACKED + dims for dims in weight_dims]

    def __call__(
        self, x: tf.Tensor, shared: Tensors, stacks: Tensors, remat: Remat
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Applies the block.

        Args:
          x: what the first block takes.
          shared: what all take.
          stacks: the weights, [R, ...].
          remat: what the gradient computes again.

        Returns:
          What the last block makes of x, and the reports, [R, ...].
        """
        block = _Keeping(self._block, self._x_dims, remat)
        if remat is Remat.NONE:
            return self._forward(block, x, shared, stacks)

        @tf.custom_gradient
        def run(x: tf.Tensor, *rest: tf.Tensor):
            shared, stacks = rest[: len(self._shared_dims)], rest[len(self._shared_dims) :]
            y, made = self._forward(block, x, shared, stacks)
            kept = list(zip(made, block.kept_dims, strict=False))

            def gradient(d_y: tf.Tensor, *d_reports: tf.Tensor) -> list[tf.Tensor]:
                return self._backward(kept, shared, stacks, d_y, d_reports)

            return [y, *made[len(kept) :]], gradient

        y, *reports = run(x, *shared, *stacks)
        return y, reports

    def _forward(
        self, block: _Keeping, x: tf.Tensor, shared: Tensors, stacks: Tensors
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The block applied R times: its result, and stacks of what is kept and reported."""
        specs = self._report_specs(block, x, shared, stacks)
        reports = specs[len(block.kept_dims) :]
        report_dims = [*block.kept_dims, *("_" * spec.shape.rank for spec in reports)]
        dims = [self._x_dims, *self._stack_dims, *(STACKED + d for d in report_dims)]

        def body(i: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
            x, *rest = self._annotated(carried, dims)
            taken = [_take(stack, i) for stack in rest[: len(stacks)]]
            weights = self._annotated([weight for _, weight in taken], self._weight_dims)
            x, *new = block(i, x, *shared, *weights)
            put = [_put(stack, i, r) for stack, r in zip(rest[len(stacks) :], new, strict=True)]
            return self._annotated([x, *(stack for stack, _ in taken), *put], dims)

        empty = [tf.zeros([self._num_blocks, *s.shape], s.dtype) for s in specs]
        x, *rest = self._while(body, [x, *stacks, *empty])
        return x, rest[len(stacks) :]

    def _backward(
        self,
        kept: Sequence[tuple[tf.Tensor, str]],
        shared: Tensors,
        stacks: Tensors,
        d_y: tf.Tensor,
        d_reports: Tensors,
    ) -> list[tf.Tensor]:
        """Gradients of x, shared and stacks; `kept` are the stacks of _Keeping, and their dims."""
        one_dims = [self._x_dims, *self._shared_dims, *self._weight_dims]
        dims = [self._x_dims, *self._shared_dims, *self._stack_dims]

        def body(k: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
            i = self._num_blocks - 1 - k
            d_x, *sums = self._annotated(carried, dims)
            weights = [_weight(stack, i) for stack in stacks]
            x, *products = (self._annotate(_item(stack, i), d) for stack, d in kept)
            args = self._annotated([x, *shared, *weights], one_dims)
            d_results = [d_x, *(_item(stack, i) for stack in d_reports)]
            block = functools.partial(self._block, _replayed(products), i)
            d_args = _pull_back(block, args, d_results)
            d_x, *new = self._annotated(d_args, one_dims)
            n = len(shared)
            d_shared = [a + b for a, b in zip(sums[:n], new[:n], strict=True)]
            d_stacks = [
                _replaced(s, i, tf.cast(d, s.dtype)) for s, d in zip(sums[n:], new[n:], strict=True)
            ]
            return self._annotated([d_x, *d_shared, *d_stacks], dims)

        empty = [tf.zeros(s.shape, _gradient_dtype(s, d_y.dtype)) for s in stacks]
        sums = self._while(body, [d_y, *map(tf.zeros_like, shared), *empty])
        args = [d_y, *shared, *stacks]
        return [tf.cast(d, arg.dtype) for d, arg in zip(sums, args, strict=True)]

    def _report_specs(
        self, block: _Keeping, x: tf.Tensor, shared: Tensors, stacks: Tensors
    ) -> list[tf.TensorSpec]:
        """What one block reports, of a trace that becomes no part of the program."""
        args = [tf.TensorSpec(t.shape, t.dtype) for t in [x, *shared]]
        args += [tf.TensorSpec(t.shape[1:], t.dtype) for t in stacks]
        traced = tf.function(functools.partial(block, 0), autograph=False, input_signature=args)
        _, *reports = traced.get_concrete_function().outputs
        return [tf.TensorSpec(t.shape, t.dtype) for t in reports]

    def _while(self, body: Callable[..., list[tf.Tensor]], start: Tensors) -> list[tf.Tensor]:
        _, *carried = tf.while_loop(
            lambda k, *_: k < self._num_blocks,
            lambda k, *carried: [k + 1, *body(k, *carried)],
            [tf.constant(0), *start],
            maximum_iterations=self._num_blocks,
        )
        return carried

    def _annotated(self, tensors: Tensors, dims: Sequence[str]) -> list[tf.Tensor]:
        return [self._annotate(tensor, d) for tensor, d in zip(tensors, dims, strict=True)]


def _pull_back(
    fn: Callable[..., list[tf.Tensor]], args: Tensors, d_results: Tensors
) -> list[tf.Tensor]:
    """Gradients of args, given those of fn(*args), which is computed once more."""
    # Without it the compiler would see that this computes what is there, and keep that.
    held = xla.optimization_barrier(*args, *d_results)
    args, d_results = held[: len(args)], held[len(args) :]
    with tf.GradientTape() as tape:
        tape.watch(args)
        results = fn(*args)
    return tape.gradient(results, args, d_results, unconnected_gradients="zero")


def _gradient_dtype(stack: tf.Tensor, activations: tf.DType) -> tf.DType:
    """Of a stack's gradient while the loop writes it.

    The products of 16-bit activations that matrices' gradients are have no more bits (the router's
    do, and are rounded); and the gradients of all layers, which are there at once, are half of
    what a deep model needs.
    """
    return activations if stack.shape.rank > 2 else stack.dtype


def _take(stack: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """(stack, weight i), for a loop that carries the stack and takes each item once.

    So the items' gradients are written into the stack's, none is added to the whole of it.
    """

    @tf.custom_gradient
    def both(stack: tf.Tensor):
        return (stack, _weight(stack, i)), lambda d_stack, d_item: _replaced(d_stack, i, d_item)

    return both(stack)


def _put(stack: tf.Tensor, i: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
    """The stack with `item` at place i, for a loop that carries it and puts each item once."""

    @tf.custom_gradient
    def written(stack: tf.Tensor, item: tf.Tensor):
        return _replaced(stack, i, item), lambda d_stack: (d_stack, _item(d_stack, i))

    return written(stack, item)


def _weight(stack: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    """Weight i of a stack, which shall be the only copy of the weights.

    A TPU multiplies matrices in bfloat16. Where a loop does nothing else with its weights, the
    compiler narrows the whole stack before the loop, and keeps it beside the float32 one that the
    optimizer needs. A float32 product, with a one that it cannot see through, keeps it from that.
    """
    (one,) = xla.optimization_barrier(tf.ones([], stack.dtype))
    return one * _item(stack, i)


def _item(stack: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
    start = tf.stack([i] + [0] * (stack.shape.rank - 1))
    return xla.dynamic_slice(stack, start, [1, *stack.shape[1:]])[0]


def _replaced(stack: tf.Tensor, i: tf.Tensor, item: tf.Tensor) -> tf.Tensor:
    start = tf.stack([i] + [0] * (stack.shape.rank - 1))
    return xla.dynamic_update_slice(stack, item[None], start)
