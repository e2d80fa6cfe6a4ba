"""One partition's part of experts without a capacity: its own experts' tokens, in tiles.

The assignments of tokens come sorted by expert. Each expert that has some is visited in turn, and
its rows are multiplied a tile at a time, so that idle experts and padding cost nothing. The
gradient takes the same tiles in the same order. It computes the hidden units of a tile again, and
so keeps nothing but the tokens.

ragged_experts.py lists the letters. A partition has these tensors, in a NestedMap:

  bounds_2      the beginning and end of this partition's assignments in the order of experts
  expert_O      the expert of each assignment in that order
  token_O       the token of each
  assignment_O  the assignments themselves
  position_J    the place of each assignment in that order
  blocks_n      the index of this layer in each stack of weights
  x_IM          the tokens
  rows_OM       zeros that the results replace
  weights       stacks of the own experts' weights in R layers, [R, X, ...]; R may be 1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.layers.slices import read_at, read_element, write_at, write_element


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a layer: their weights, and how they compute."""

    # Weights: wi [E, M, H], wo [E, H, M] and, if gated, wi_gate [E, M, H]; perhaps the bias of each
    # of them, such as wi_bias [E, 1, H]. A stack may be read one expert at a time.
    theta: NestedMap
    # Maps a function that multiplies tokens by the weight of a name to their hidden units.
    hidden_units: Callable[[Callable[[str], tf.Tensor]], tf.Tensor]
    hidden_dim: int  # H.
    dropout: Callable[[tf.Tensor], tf.Tensor]  # Drops hidden units of buffers, [E, G * C, H].
    numerics: Numerics

    @property
    def num_experts(self) -> int:
        """E."""
        return self.theta.wo.shape[0]

    @property
    def stacks(self) -> list[tf.Tensor]:
        """All tensors of the weights, as stacks [R, E, ...]."""
        return [stack for weight in self.theta.Flatten() for stack in weight.stacks]

    @property
    def blocks(self) -> list[int]:
        """The index of this layer in each of `stacks`."""
        return [weight.index or 0 for weight in self.theta.Flatten() for _ in weight.tensors]

    def outputs(self, x_ZM: tf.Tensor, own: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns one expert's outputs for x, both [Z, M], by its own part of each stack."""
        # A loop over tiles keeps nothing, and the products of a whole batch are noted outside.
        numerics = self.numerics.unrecorded()
        remaining = list(own)
        theta = NestedMap()
        for name, weight in self.theta.FlattenItems():
            count = len(weight.tensors)
            theta[name] = weight.with_tensors(remaining[:count])
            remaining = remaining[count:]

        h_ZH = self.hidden_units(functools.partial(numerics.project, "ZM,MH->ZH", x_ZM, theta))
        return numerics.project("ZH,HM->ZM", h_ZH, theta, "wo")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One partition's computation, tile by tile."""

    size: int  # Z.
    experts: Experts  # The experts of all partitions.

    def outputs(self, part: NestedMap) -> NestedMap:
        """Returns y_JM, the outputs of assignments; arbitrary where others own the expert."""
        blocks = tf.unstack(part.blocks_n)

        def expert_rows(
            expert: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, rows: NestedMap
        ) -> NestedMap:
            weights = _own_weights(part, blocks, expert)

            def tile_rows(start: tf.Tensor, rows: NestedMap) -> tuple[tf.Tensor, NestedMap]:
                """A tile may run into the next expert's rows, which that expert then overwrites."""
                x_ZM = tf.gather(part.x_IM, read_at(part.token_O, start, self.size))
                y_ZM = self.experts.outputs(x_ZM, weights)
                rows_OM = write_at(rows.y_OM, y_ZM, start, axis=0)
                return start + self.size, NestedMap(y_OM=rows_OM)

            _, rows = tf.while_loop(lambda start, _: start < end, tile_rows, (begin, rows))
            return rows

        rows = _over_experts(part, expert_rows, NestedMap(y_OM=part.rows_OM))
        return NestedMap(y_JM=tf.gather(rows.y_OM, part.position_J))

    def gradients(self, part: NestedMap) -> NestedMap:
        """Returns the gradients of `outputs`: d_x_JM by x for each assignment, and by the weights.

        `part` has two more tensors: d_y_JM, the gradient of the outputs, which is 0 for other
        partitions' assignments; and d_weights, zeros [R, X, 1, ...] that the weights' gradients
        replace.
        """
        blocks = tf.unstack(part.blocks_n)

        def expert_gradients(
            expert: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, d: NestedMap
        ) -> NestedMap:
            weights = _own_weights(part, blocks, expert)

            def add_tile(start: tf.Tensor, total: NestedMap) -> tuple[tf.Tensor, NestedMap]:
                x_ZM = tf.gather(part.x_IM, read_at(part.token_O, start, self.size))
                d_y_ZM = tf.gather(part.d_y_JM, read_at(part.assignment_O, start, self.size))

                # Rows of the next expert do not belong to this one's gradients.
                is_own_Z = start + tf.range(self.size) < end
                d_y_ZM = tf.where(is_own_Z[:, None], d_y_ZM, tf.zeros([], d_y_ZM.dtype))

                d_x_ZM, *d_own = self._tile_gradients(x_ZM, weights, d_y_ZM)
                d_weights = [
                    tile_sum + own for tile_sum, own in zip(total.weights, d_own, strict=True)
                ]
                d_x_OM = write_at(total.x_OM, d_x_ZM, start, axis=0)
                return start + self.size, NestedMap(x_OM=d_x_OM, weights=d_weights)

            zeros = [tf.zeros_like(weight) for weight in weights]
            empty = NestedMap(x_OM=d.x_OM, weights=zeros)
            _, total = tf.while_loop(lambda start, _: start < end, add_tile, (begin, empty))

            # The sums over this expert's tiles become its part of the stacks' gradients.
            stacks = [
                write_element(stack, own, (block, expert))
                for stack, own, block in zip(d.stacks, total.weights, blocks, strict=True)
            ]
            return NestedMap(x_OM=total.x_OM, stacks=stacks)

        # The gradients have a dim of 1 for the part Y of the tokens. Their stacks do not.
        unsummed = [
            tf.reshape(zeros, stack.shape)
            for zeros, stack in zip(part.d_weights, part.weights, strict=True)
        ]
        d = _over_experts(part, expert_gradients, NestedMap(x_OM=part.rows_OM, stacks=unsummed))
        d_weights = [
            tf.reshape(stack, zeros.shape)
            for stack, zeros in zip(d.stacks, part.d_weights, strict=True)
        ]
        return NestedMap(d_x_JM=tf.gather(d.x_OM, part.position_J), d_weights=d_weights)

    def _tile_gradients(
        self, x_ZM: tf.Tensor, weights: Sequence[tf.Tensor], d_y_ZM: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients by a tile's rows and by one expert's weights."""
        # The hidden units are computed again, so the forward pass keeps none of them.
        factors = [x_ZM, *weights]
        with tf.GradientTape() as tape:
            tape.watch(factors)
            y_ZM = self.experts.outputs(x_ZM, weights)
        return tape.gradient(y_ZM, factors, d_y_ZM)


def _own_weights(
    part: NestedMap, blocks: Sequence[tf.Tensor], expert: tf.Tensor
) -> list[tf.Tensor]:
    """Returns the weights of one of the partition's experts, [...] each."""
    return [
        read_element(stack, (block, expert))
        for stack, block in zip(part.weights, blocks, strict=True)
    ]


def _over_experts(
    part: NestedMap,
    visit: Callable[[tf.Tensor, tf.Tensor, tf.Tensor, NestedMap], NestedMap],
    carried: NestedMap,
) -> NestedMap:
    """Visits the partition's experts that have assignments; returns the last visit's tensors.

    `visit` takes an expert's index among the partition's own, the beginning and end of its
    assignments, and the tensors that the previous visit returned.
    """
    begin, end = tf.unstack(part.bounds_2)
    num_own = part.weights[0].shape[1]

    def next_expert(begin: tf.Tensor, carried: NestedMap) -> tuple[tf.Tensor, NestedMap]:
        """Visits the expert that the assignment at `begin` has."""
        expert = read_at(part.expert_O, begin, 1)
        after = count_true(part.expert_O <= expert)

        # Partitions have equal numbers of consecutive experts.
        own = tf.reshape(expert % num_own, [])
        return after, visit(own, begin, after, carried)

    _, carried = tf.while_loop(lambda place, _: place < end, next_expert, (begin, carried))
    return carried


def count_true(is_true: tf.Tensor) -> tf.Tensor:
    """Returns how many elements of the last dim are true."""
    return tf.reduce_sum(tf.cast(is_true, tf.int32), -1)
