"""GPipe: a stack's blocks in stages, which work on different microbatches at the same time.

In tick t stage s has microbatch t - s. With 3 stages and 4 microbatches (Figure 2 of Huang et al.
2019, arXiv:1811.06965, of which this is the forward pass):

              tick 0   tick 1   tick 2   tick 3   tick 4   tick 5
    stage 0   batch 0  batch 1  batch 2  batch 3     .        .
    stage 1      .     batch 0  batch 1  batch 2  batch 3     .
    stage 2      .        .     batch 0  batch 1  batch 2  batch 3

Each dot is a stage without a microbatch, the bubble: it computes on zeros or old activations, and
nothing uses its result. The first row shows how microbatches enter, and the last row how they
leave. A stage's reports of all microbatches are its row without the dots.

Stages are the leading dim of weights and activations, R. The table's row of R splits both, so each
device applies its own stage to all that reaches it, and the shift of activations from a stage to
the next one is a collective-permute. All ticks are iterations of one loop over the stages' program.

B batch, Q rows of a microbatch, L length of all tensors that travel, M model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import tf_private
from lingvo_gshard.core.base_layer import STACKED
from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.layers.products import dot, transposed_copy
from lingvo_gshard.layers.repeat import Carried, Loop, Tensors
from lingvo_gshard.sharding.annotator import Annotator

_TRAVELLING = f"{STACKED}BLM"
_NO_PADDING = (0, 0)

# (index of the microbatch, index of the block, numerics, inputs) -> results.
StageBlock = Callable[
    ["tf.Tensor", "tf.Tensor", Numerics, "Carried[tf.Tensor]"], "Carried[tf.Tensor]"
]


def microbatches_of(x: tf.Tensor, dims: str, count: int, annotator: Annotator) -> tf.Tensor:
    """Returns x [B, ...] with these dims as `count` microbatches [_, Q, ...].

    Each microbatch has rows of every device, so that no row moves: row b belongs to microbatch
    b % count.
    """
    # Stages hold rows that are split over all axes but their own. The batch takes that layout
    # first: XLA has no sharding for the reshape of rows that are split over the stages' axis, too,
    # and would hold all of them on each device.
    inside = annotator.over(STACKED)
    x = inside.annotate_outside(x, dims)

    rows_by_microbatch = tf.reshape(x, [-1, count, *x.shape[1:]])
    rest = range(2, len(rows_by_microbatch.shape))
    microbatches = tf.transpose(rows_by_microbatch, [1, 0, *rest])
    return inside.annotate_outside(microbatches, "_" + dims)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A block applied R times to each microbatch, in stages of as many blocks each.

    The block is as in repeat.py, but takes the index of its microbatch, too. It keeps nothing but
    its input: tf.vectorized_map, which applies it for all stages, drops custom gradients, by which
    products are kept. The shared tensors travel along with x, so they are [B, _, M], too.
    """

    block: StageBlock
    num_blocks: int  # R.
    stages: int
    microbatches: int
    annotator: Annotator
    weight_dims: Sequence[str]  # The dims of each weight of one block.
    numerics: Numerics

    @property
    def _blocks_per_stage(self) -> int:
        return self.num_blocks // self.stages

    def __call__(self, inputs: Carried[tf.Tensor]) -> Carried[tf.Tensor]:
        """Applies the blocks to a batch, as Loop does; reports are means over the microbatches.

        Raises ValueError if the mesh splits the stages or the rows of a microbatch unevenly.
        """
        self._check(inputs.x.shape[0])
        travelling = [inputs.x, *inputs.shared]
        lengths = [tensor.shape[1] for tensor in travelling]

        # A loop over ticks. All ticks share the weights, and each takes the microbatch that enters
        # from a stack.
        ticks = Loop(
            functools.partial(self._tick, lengths),
            self.microbatches + self.stages - 1,
            self.annotator,
            Carried(
                _TRAVELLING,
                shared=[STACKED + dims for dims in self.weight_dims] * self._blocks_per_stage,
                weights=[_TRAVELLING],
            ),
            are_products=[True],  # The entering batch is activations.
            numerics=self.numerics,
            stack_dim="_",
            report_dims=_report_dims,
            as_function=True,
        )

        # The pipeline starts idle, as if zeros had been in all stages.
        entering = self._entering(tf.concat(travelling, 1))
        weights = self._weights_by_block(inputs.weights)
        idle = tf.zeros_like(entering[0])
        result = ticks(Carried(idle, weights, [entering]))

        # The first report of a tick is the output of its stages.
        leaving, *reports = result.reports
        return Carried(
            self._batch_of(leaving),
            reports=[self._mean_over_microbatches(report) for report in reports],
        )

    def _check(self, batch: int) -> None:
        stage_partitions, row_partitions, *_ = self.annotator.factor(_TRAVELLING)

        # A partition has whole stages.
        if self.stages % stage_partitions:
            raise ValueError(
                f"stages={self.stages} is not a multiple of the {stage_partitions} partitions "
                f"along the mesh axis of {STACKED}; change stages, or the mesh."
            )

        # Each partition has as many rows of every microbatch.
        if batch % (self.microbatches * row_partitions):
            raise ValueError(
                f"microbatches={self.microbatches} does not divide a batch of {batch} rows into "
                f"parts for {row_partitions} partitions; choose a divisor of "
                f"{batch // row_partitions}."
            )

    def _entering(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the tensors that are added to the stages' inputs by tick: [ticks, R, Q, L, M].

        At the first stage this is a microbatch, as long as there are any, and elsewhere zeros.
        """
        microbatches = microbatches_of(x, "BLM", self.microbatches, self.annotator)
        paddings = [
            (0, self.stages - 1),  # Ticks: after the last microbatch, none enters.
            (0, self.stages - 1),  # R: none enters at any stage but the first.
            _NO_PADDING,  # Q
            _NO_PADDING,  # L
            _NO_PADDING,  # M
        ]
        entering = tf.pad(microbatches[:, None], paddings)
        return self.annotator.annotate(entering, f"_{_TRAVELLING}")

    def _weights_by_block(self, stacks: Tensors) -> list[tf.Tensor]:
        """Returns the weights of a stage's first block, second block, ..., each [R, ...].

        There is a tensor for each block, so that a tick only adds to its gradient: the compilers
        for TPUs and GPUs then sum it over the rows' partitions once, after the loop.
        """
        stages = [tf.reshape(stack, [self.stages, -1, *stack.shape[1:]]) for stack in stacks]
        blocks_of_weights = [tf.unstack(weight, axis=1) for weight in stages]
        weights: list[tf.Tensor] = []
        for block in zip(*blocks_of_weights, strict=True):
            weights += block
        return weights

    def _batch_of(self, leaving: tf.Tensor) -> tf.Tensor:
        """Returns y [B, L, M] from all stages' outputs in all ticks, [ticks, R, Q, L, M]."""
        # The first microbatch reaches the last stage's end in tick stages - 1.
        microbatches = leaving[self.stages - 1 :, -1]

        # The inverse of microbatches_of.
        rows = tf.transpose(microbatches, [1, 0, 2, 3])
        y = tf.reshape(rows, [-1, *microbatches.shape[2:]])
        y = self.annotator.over(STACKED).annotate_outside(y, "BLM")

        # From here on, rows are split over the stages' axis, too.
        return self.annotator.annotate(y, "BLM")

    def _tick(
        self,
        lengths: Sequence[int],
        tick: tf.Tensor,
        numerics: Numerics,
        inputs: Carried[tf.Tensor],
    ) -> Carried[tf.Tensor]:
        """Applies all stages, as a repeat.Block that also reports x without the shared tensors.

        It takes the last tick's outputs as x [R, Q, L, M], the weights of all blocks of a stage
        as shared tensors, and the batch that enters in this tick as its only weight.
        """
        numerics = numerics.in_loop(self.stages)
        (entering,) = inputs.weights

        # Each stage takes the output of the stage before it, and the first one the entering batch.
        shift = [(1, 0), _NO_PADDING, _NO_PADDING, _NO_PADDING]
        x = self.annotator.annotate(tf.pad(inputs.x[:-1], shift), _TRAVELLING)

        def stage(index: tf.Tensor, x: tf.Tensor, *weights: tf.Tensor) -> list[tf.Tensor]:
            result = self._stage(lengths, tick, index, numerics, Carried(x, weights=weights))
            return tf.nest.flatten(result)

        # One program for all stages: the map's dim is R, which the mesh splits.
        stage_indices = tf.range(self.stages)
        y, *reports = _mapped(stage, [stage_indices, x + entering, *inputs.shared])
        y = self.annotator.annotate(y, _TRAVELLING)
        return Carried(y, reports=[y[:, :, : lengths[0]], *reports])

    def _stage(
        self,
        lengths: Sequence[int],
        tick: tf.Tensor,
        stage: tf.Tensor,
        numerics: Numerics,
        inputs: Carried[tf.Tensor],
    ) -> Carried[tf.Tensor]:
        """Applies the blocks of one stage to x and the shared tensors, which are joined over L.

        The weights of all its blocks come in order. The reports are [blocks, ...].
        """
        # In the bubble this is the index of another microbatch, since the masks of one must exist.
        microbatch = tf.clip_by_value(tick - stage, 0, self.microbatches - 1)
        x, *shared = tf.split(inputs.x, lengths, axis=1)

        num_weights = len(self.weight_dims)
        reports_by_block: list[Tensors] = []
        for i in range(self._blocks_per_stage):
            weights = inputs.weights[i * num_weights : (i + 1) * num_weights]
            block_index = stage * self._blocks_per_stage + i
            result = self.block(microbatch, block_index, numerics, Carried(x, shared, weights))
            x = result.x
            reports_by_block.append(result.reports)

        # The shared tensors travel on to the next stage.
        joined = tf.concat([x, *shared], 1)
        reports = [tf.stack(reports) for reports in zip(*reports_by_block, strict=True)]
        return Carried(joined, reports=reports)

    def _mean_over_microbatches(self, report: tf.Tensor) -> tf.Tensor:
        """Returns the means [R, ...] of a report [ticks, stages, blocks of a stage, ...]."""
        # Stage s has its microbatches in ticks s, s + 1, ...; other ticks are the bubble.
        by_stage = [report[s : s + self.microbatches, s] for s in range(self.stages)]
        return tf.concat([tf.reduce_mean(of_stage, 0) for of_stage in by_stage], 0)


def _mapped(fn: Callable[..., list[tf.Tensor]], args: Tensors) -> list[tf.Tensor]:
    """Returns the results of `fn` for each index of the first dim of all arguments, stacked."""
    _register_mapped_product()
    return tf_private.mapped(lambda i: fn(*(tf.gather(arg, i) for arg in args)), args[0].shape[0])


@functools.cache
def _register_mapped_product() -> None:
    """Registers the map of a product of 16-bit factors: one product for all stages."""
    pfor = tf_private.pfor

    @pfor.RegisterPFor("BatchMatMulV3")
    def mapped_product(inputs: Any) -> Any:
        inputs.stack_inputs()
        a = inputs.stacked_input(0)
        b = inputs.stacked_input(1)
        if inputs.get_attr("adj_y"):
            b = tf.linalg.matrix_transpose(b)
        product = tf.custom_gradient(_product)(a, b)
        return pfor.wrap(tf.cast(product, inputs.get_attr("Tout")), True)


def _product(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Callable[..., list[tf.Tensor]]]:
    """Returns a times b, both bfloat16, and its gradients, which TensorFlow lacks, all float32."""

    def gradient(d: tf.Tensor) -> list[tf.Tensor]:
        d = tf.cast(d, tf.bfloat16)
        return [dot(d, transposed_copy(b)), dot(transposed_copy(a), d)]

    return dot(a, b), gradient


def _report_dims(report: tf.Tensor) -> str:
    """Returns the dims of a tick's report, which is x or statistics of each stage's blocks."""
    rank = report.shape.rank
    return _TRAVELLING if rank == len(_TRAVELLING) else STACKED + "_" * (rank - 1)
