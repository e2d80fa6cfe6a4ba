"""GPipe: a stack's blocks in stages, which work on different microbatches at the same time.

Stages are the leading dim of weights and activations, R. The table's row of R splits both, so each
device applies its own stage to all that reaches it, and the shift of activations from a stage to
the next one is a collective-permute. In tick t stage s has microbatch t - s. The stages of the
first and last ticks have none, and compute a bubble that nothing uses.

B batch, Q rows of a microbatch, L length of all tensors that travel, M model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import control_flow_ops, pfor, tf
from lingvo_gshard.layers.context import Products
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.products import dot, moved
from lingvo_gshard.layers.repeat import Block, Layers, Loop, Remat, Tensors
from lingvo_gshard.sharding.annotator import Annotator

_TRAVELLING = f"{STACKED}BLM"


def check_pipeline(name: str, p: Params, block_size: int) -> None:
    """Raises ValueError if the stack called `name` can't have its stages or microbatches."""
    if p.stages < 1 or p.microbatches < 1 or p.stages == 1 < p.microbatches:
        raise ValueError(
            f"{name}: stages={p.stages} and microbatches={p.microbatches}: both must be 1 or "
            "more, and microbatches need 2 stages or more."
        )
    if p.stages == 1:
        return
    blocks = p.num_layers // block_size
    needed = {
        "layers_as=LOOP": p.layers_as is Layers.LOOP,
        "remat=BLOCK": p.remat is Remat.BLOCK,
        "moe.dispatch=EINSUM": p.moe is None or p.moe.dispatch is Dispatch.EINSUM,
        f"a number of stages that divides its {blocks} blocks": blocks % p.stages == 0,
    }
    for what, holds in needed.items():
        if not holds:
            raise ValueError(f"{name}: a pipeline of stages={p.stages} needs {what}.")


def microbatches_of(x: tf.Tensor, dims: str, count: int, annotator: Annotator) -> tf.Tensor:
    """x [B, ...] with these dims as microbatches [_, Q, ...]; each row stays on its device.

    Before, x takes the layout of the rows inside of the stages. Rows that lie over the stages'
    axis, too, may be cut by the reshape where no sharding can follow, so that each device would
    have to hold all of them.
    """
    inside = annotator.over(STACKED)
    rows = tf.reshape(inside.annotate_outside(x, dims), [-1, count, *x.shape[1:]])
    parts = tf.transpose(rows, [1, 0, *range(2, len(rows.shape))])
    return inside.annotate_outside(parts, "_" + dims)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A block applied R times to each microbatch, in stages of as many blocks each.

    The block is as in repeat.py, but takes the index of its microbatch in place of `products`: it
    is applied by tf.vectorized_map, which drops custom gradients. The shared tensors are [B, _, M]
    as x. The dims are those of each weight of one block.
    """

    block: Block
    num_blocks: int
    stages: int
    microbatches: int
    annotator: Annotator
    weight_dims: Sequence[str]

    def __call__(
        self, x: tf.Tensor, shared: Tensors, stacks: Tensors, remat: Remat
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """As Loop, with reports averaged over microbatches; ValueError if partitions are uneven."""
        self._check(x.shape[0])
        depth = self.num_blocks // self.stages
        loop = Loop(
            functools.partial(self._tick, [each.shape[1] for each in (x, *shared)]),
            self.microbatches + self.stages - 1,
            self.annotator,
            _TRAVELLING,
            shared_dims=[STACKED + dims for dims in self.weight_dims] * depth,
            weight_dims=[_TRAVELLING],
            stack_dim="_",
            report_dims=_report_dims,
            as_function=True,
        )
        rows = tf.concat([x, *shared], 1)
        rows = microbatches_of(rows, "BLM", self.microbatches, self.annotator)[:, None]
        bubble = [[0, self.stages - 1]] * 2 + [[0, 0]] * 3
        # Added to the stages' inputs in each tick, at the first stage: [_, R, Q, L, M].
        entering = self.annotator.annotate(tf.pad(rows, bubble), f"_{_TRAVELLING}")
        # A tensor for each block, so that a tick only adds to its gradient: the compilers for TPUs
        # and GPUs then sum it over the rows' partitions once, after the loop.
        stages = [tf.reshape(each, [self.stages, -1, *each.shape[1:]]) for each in stacks]
        blocks = zip(*(tf.unstack(each, axis=1) for each in stages), strict=True)
        weights = [weight for block in blocks for weight in block]
        _, (leaving, *reports) = loop(tf.zeros_like(entering[0]), weights, [entering], remat)
        microbatches = leaving[self.stages - 1 :, -1]
        y = tf.reshape(tf.transpose(microbatches, [1, 0, 2, 3]), [-1, *microbatches.shape[2:]])
        y = self.annotator.over(STACKED).annotate_outside(y, "BLM")
        y = self.annotator.annotate(y, "BLM")
        return y, [self._mean(report) for report in reports]

    def _check(self, batch: int) -> None:
        of_stages, of_rows, *_ = self.annotator.factor(_TRAVELLING)
        if self.stages % of_stages:
            raise ValueError(
                f"stages={self.stages} is not a multiple of the {of_stages} partitions along the "
                f"mesh axis of {STACKED}; change stages, or the mesh."
            )
        if batch % (self.microbatches * of_rows):
            raise ValueError(
                f"microbatches={self.microbatches} does not divide a batch of {batch} rows into "
                f"parts for {of_rows} partitions; choose a divisor of {batch // of_rows}."
            )

    def _tick(
        self, lengths: Sequence[int], tick: tf.Tensor, products: Products, x: tf.Tensor, *rest
    ) -> list[tf.Tensor]:
        """Applies all stages, as a repeat.Block that also reports x without the shared tensors."""
        del products
        *weights, entering = rest
        x = self.annotator.annotate(tf.pad(x[:-1], [[1, 0], *[[0, 0]] * 3]), _TRAVELLING)
        args = (tf.range(self.stages), x + entering, *weights)
        y, *reports = _mapped(functools.partial(self._stage, lengths, tick), args)
        y = self.annotator.annotate(y, _TRAVELLING)
        return [y, y[:, :, : lengths[0]], *reports]

    def _stage(
        self, lengths: Sequence[int], tick: tf.Tensor, stage: tf.Tensor, x: tf.Tensor, *weights
    ) -> list[tf.Tensor]:
        """Applies the blocks of one stage to x and the shared tensors, which are joined over L."""
        microbatch = tf.clip_by_value(tick - stage, 0, self.microbatches - 1)
        x, *shared = tf.split(x, lengths, axis=1)
        depth, reports, n = self.num_blocks // self.stages, [], len(self.weight_dims)
        for i in range(depth):
            own = weights[i * n : (i + 1) * n]
            x, *new = self.block(microbatch, stage * depth + i, x, *shared, *own)
            reports.append(new)
        return [tf.concat([x, *shared], 1), *map(tf.stack, zip(*reports, strict=True))]

    def _mean(self, report: tf.Tensor) -> tf.Tensor:
        """[R, ...]: the mean over the microbatches of a report [ticks, stages, blocks, ...]."""
        of_stages = [report[s : s + self.microbatches, s] for s in range(self.stages)]
        return tf.concat([tf.reduce_mean(each, 0) for each in of_stages], 0)


def _mapped(fn: Callable[..., list[tf.Tensor]], args: Tensors) -> list[tf.Tensor]:
    """tf.vectorized_map of `fn` over the first dim of all arguments, in a Loop's own function.

    The public one is a function inside the loop. In its gradient TensorFlow takes all that enters
    the map for possible constants, and so holds whole activations where it lowers the program.
    """
    _register_mapped_product()
    return control_flow_ops._pfor_impl(
        lambda i: fn(*(tf.gather(each, i) for each in args)),
        args[0].shape[0],
        fallback_to_while_loop=False,
    )


@functools.cache
def _register_mapped_product() -> None:
    """Registers the map of a product of 16-bit factors: one product of all stages'."""

    @pfor.RegisterPFor("BatchMatMulV3")
    def mapped_product(inputs: pfor._PforInput) -> pfor.WrappedTensor:
        inputs.stack_inputs()
        a, b = inputs.stacked_input(0), inputs.stacked_input(1)
        if inputs.get_attr("adj_y"):
            b = tf.linalg.matrix_transpose(b)
        return pfor.wrap(tf.custom_gradient(_product)(a, b), True)


def _product(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Callable[..., list[tf.Tensor]]]:
    """a times b, both bfloat16, and the gradients, all float32; TensorFlow defines none."""

    def gradient(d: tf.Tensor) -> list[tf.Tensor]:
        d = tf.cast(d, tf.bfloat16)
        return [dot(d, moved(b)), dot(moved(a), d)]

    return dot(a, b), gradient


def _report_dims(report: tf.Tensor) -> str:
    """The dims of a tick's report: of x, or of the statistics of each stage's blocks."""
    rank = report.shape.rank
    return _TRAVELLING if rank == len(_TRAVELLING) else STACKED + "_" * (rank - 1)
