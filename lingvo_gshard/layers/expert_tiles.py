"""What one partition computes of experts without a capacity: its own experts' tokens, in tiles.

The assignments of tokens come sorted by expert. Each expert that has some is visited in turn, and
its rows are multiplied a tile at a time, so that idle experts and padding cost nothing. The
gradient takes the same tiles in the same order. It computes the hidden units of a tile again, and
so keeps nothing but the tokens.

The letters are those of ragged_experts.py. Each partition has one W and one Y, so that all of its
tensors but weights begin with two dims of 1. Weights are stacks of those of R blocks of layers, of
which this layer's are one; R is 1 where they are no part of a stack.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.products import with_bias
from lingvo_gshard.layers.slices import Item, read_at, read_element, write_at, write_element
from lingvo_gshard.layers.stored_weights import Weight


@dataclasses.dataclass(frozen=True)
class Experts:
    """What the experts of a layer compute with."""

    # wi [E, M, H], wo [E, H, M] and, if gated, wi_gate [E, M, H], or what they are kept as; perhaps
    # the bias of each of them, such as wi_bias [E, 1, H]. Or Items: then those of one expert at a
    # time are read from their stacks, and the others are not copied.
    weights: dict[str, Weight]
    # Maps a function that multiplies tokens by the weight of a name to their hidden units.
    hidden_units: Callable[[Callable[[str], tf.Tensor]], tf.Tensor]

    @property
    def num_experts(self) -> int:
        """E."""
        return _as_stack(self._leaves()[0]).shape[1]

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The weights as tensors [R, E, ...], in order: one each, or those that it is kept as."""
        return [_as_stack(leaf) for leaf in self._leaves()]

    @property
    def blocks(self) -> list[int]:
        """The index of this layer's weight in each of `tensors`."""
        return [leaf.index if isinstance(leaf, Item) else 0 for leaf in self._leaves()]

    def _leaves(self) -> list[tf.Tensor | Item]:
        leaves = []
        for weight in self.weights.values():
            leaves += NestedMap(weight=weight).Flatten()
        return leaves

    def outputs(
        self,
        x_ZM: tf.Tensor,
        tensors: Sequence[tf.Tensor],
        matmul: Callable[[tf.Tensor, Weight], tf.Tensor],
    ) -> tf.Tensor:
        """Returns one expert's outputs for x, both [Z, M], by its own part of `tensors`."""
        remaining = iter(tensors)
        own = NestedMap()
        for name, weight in self.weights.items():
            structure = NestedMap(weight=weight)
            count = len(structure.Flatten())
            own[name] = structure.Pack(itertools.islice(remaining, count)).weight

        h_ZH = self.hidden_units(lambda name: with_bias(matmul(x_ZM, own[name]), own, name))
        return with_bias(matmul(h_ZH, own.wo), own, "wo")


def _as_stack(leaf: tf.Tensor | Item) -> tf.Tensor:
    """Returns the stack of an Item, [R, ...], or a tensor as the only one of a stack, [1, ...]."""
    return leaf.stack if isinstance(leaf, Item) else leaf[None]


@dataclasses.dataclass(frozen=True)
class _Expert:
    """An expert of a partition that has assignments, and where they are in the order of experts."""

    own: tf.Tensor  # Its index among the partition's experts; these are int32 scalars.
    begin: tf.Tensor
    end: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _OwnWeights:
    """The weights of a partition's own experts, and of this layer's block of each stack of them."""

    stacks: Sequence[tf.Tensor]  # [R, X, ...]
    blocks: Sequence[tf.Tensor]  # The index along R in each stack, int32 scalars.

    @classmethod
    def of_block(cls, stacks: Sequence[tf.Tensor], blocks_11n: tf.Tensor) -> _OwnWeights:
        """Returns the weights of n stacks in the blocks [1, 1, n]."""
        return cls(stacks, tf.unstack(tf.reshape(blocks_11n, [len(stacks)])))

    @property
    def num_own(self) -> int:
        """X."""
        return self.stacks[0].shape[1]

    def of(self, expert: _Expert) -> list[tf.Tensor]:
        """Returns an expert's weights, [...] each."""
        return [
            read_element(stack, (block, expert.own))
            for stack, block in zip(self.stacks, self.blocks, strict=True)
        ]

    def written(
        self, d_stacks: Sequence[tf.Tensor], d_weights: Sequence[tf.Tensor], expert: _Expert
    ) -> list[tf.Tensor]:
        """Returns the stacks' gradients with those of an expert's weights in their places."""
        return [
            write_element(d_stack, d_weight, (block, expert.own))
            for d_stack, d_weight, block in zip(d_stacks, d_weights, self.blocks, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What one partition computes with: its own experts' assignments, tile by tile."""

    size: int  # Z.
    experts: Experts  # Those of all partitions.
    matmul: Callable[[tf.Tensor, Weight], tf.Tensor]  # Multiplies rows with a weight.

    def outputs(
        self,
        bounds_112: tf.Tensor,
        expert_11O: tf.Tensor,
        token_11O: tf.Tensor,
        position_11J: tf.Tensor,
        blocks_11n: tf.Tensor,
        x_11IM: tf.Tensor,
        rows_11OM: tf.Tensor,
        *own_weights: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the outputs of assignments, [1, 1, J, M]; arbitrary where others own the expert.

        Args:
          bounds_112: Where this partition's assignments begin and end in the order of the next two.
          expert_11O: The expert of each assignment, sorted.
          token_11O: The token of each assignment, in the same order.
          position_11J: Where each assignment is in that order.
          blocks_11n: The block of each of the weights in its stack.
          x_11IM: The tokens.
          rows_11OM: Zeros, which the outputs replace.
          *own_weights: The weights of this partition's own experts, [R, X, ...], in the order of
            `experts`.
        """
        token_O = tf.reshape(token_11O, [-1])
        x_IM = tf.reshape(x_11IM, x_11IM.shape[2:])
        rows_OM = tf.reshape(rows_11OM, rows_11OM.shape[2:])
        own = _OwnWeights.of_block(own_weights, blocks_11n)

        def expert_rows(expert: _Expert, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            """Computes all assignments of one expert."""
            weights = own.of(expert)

            def tile_rows(start: tf.Tensor, carried: list[tf.Tensor]) -> list[tf.Tensor]:
                """A tile may run into the next expert's rows, which that expert then overwrites."""
                (rows_OM,) = carried
                x_ZM = tf.gather(x_IM, read_at(token_O, start, self.size))
                outputs_ZM = self.experts.outputs(x_ZM, weights, self.matmul)
                return [write_at(rows_OM, outputs_ZM, start, axis=0)]

            return _over_tiles(expert, self.size, tile_rows, carried)

        (rows_OM,) = _over_experts(bounds_112, expert_11O, own.num_own, expert_rows, [rows_OM])
        return _by_assignment(rows_OM, position_11J)

    def gradients(
        self,
        bounds_112: tf.Tensor,
        expert_11O: tf.Tensor,
        token_11O: tf.Tensor,
        position_11J: tf.Tensor,
        blocks_11n: tf.Tensor,
        assignment_11O: tf.Tensor,
        x_11IM: tf.Tensor,
        d_11JM: tf.Tensor,
        rows_11OM: tf.Tensor,
        *weights_and_zeros: tf.Tensor,
    ) -> list[tf.Tensor]:
        """The gradients of `outputs`: by x for each assignment, [1, 1, J, M], and by the weights.

        Args:
          bounds_112: As for `outputs`.
          expert_11O: As for `outputs`.
          token_11O: As for `outputs`.
          position_11J: As for `outputs`.
          blocks_11n: As for `outputs`.
          assignment_11O: The assignments in the order of experts.
          x_11IM: The tokens.
          d_11JM: The gradient of the outputs, 0 for other partitions' assignments.
          rows_11OM: Zeros, which the gradients by x replace.
          *weights_and_zeros: The weights of the partition's own experts, [R, X, ...], then zeros
            [R, X, 1, ...] that their gradients replace.
        """
        num_weights = len(weights_and_zeros) // 2
        own = _OwnWeights.of_block(weights_and_zeros[:num_weights], blocks_11n)
        zeros = weights_and_zeros[num_weights:]

        # Without the two dims by which partitions were told apart.
        token_O = tf.reshape(token_11O, [-1])
        assignment_O = tf.reshape(assignment_11O, [-1])
        x_IM = tf.reshape(x_11IM, x_11IM.shape[2:])
        d_JM = tf.reshape(d_11JM, d_11JM.shape[2:])

        def tile_of(expert: _Expert, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            """Returns the tokens of a tile, and the gradients of their outputs."""
            x_ZM = tf.gather(x_IM, read_at(token_O, start, self.size))
            d_ZM = tf.gather(d_JM, read_at(assignment_O, start, self.size))

            # Rows of the next expert are no part of this one's gradients.
            is_own_Z = start + tf.range(self.size) < expert.end
            return x_ZM, tf.where(is_own_Z[:, None], d_ZM, tf.zeros([], d_ZM.dtype))

        def expert_gradients(expert: _Expert, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            own_tile = functools.partial(tile_of, expert)
            d_x_OM, *d_stacks = carried
            d_x_OM, *d_weights = self._expert_gradients(expert, own.of(expert), own_tile, d_x_OM)
            return [d_x_OM, *own.written(d_stacks, d_weights, expert)]

        # All experts of the partition.
        d_x_OM = tf.reshape(rows_11OM, rows_11OM.shape[2:])
        d_stacks = [
            tf.reshape(zero, stack.shape) for zero, stack in zip(zeros, own.stacks, strict=True)
        ]
        d_x_OM, *d_stacks = _over_experts(
            bounds_112, expert_11O, own.num_own, expert_gradients, [d_x_OM, *d_stacks]
        )

        d_weights = [
            tf.reshape(stack, zero.shape) for stack, zero in zip(d_stacks, zeros, strict=True)
        ]
        return [_by_assignment(d_x_OM, position_11J), *d_weights]

    def _expert_gradients(
        self,
        expert: _Expert,
        weights: Sequence[tf.Tensor],
        tile_at: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
        d_x_OM: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Returns the gradients by x, d_x_OM with this expert's rows, and those by its weights.

        `tile_at` returns the tile that starts at a row: its tokens, and the gradients of their
        outputs.
        """

        def add_tile(start: tf.Tensor, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            d_x_OM, *d_weights = carried
            x_ZM, d_ZM = tile_at(start)
            d_x_ZM, *d_own = self._tile_gradients(x_ZM, weights, d_ZM)
            d_weights = [total + own for total, own in zip(d_weights, d_own, strict=True)]
            return [write_at(d_x_OM, d_x_ZM, start, axis=0), *d_weights]

        # The sums over this expert's tiles.
        unsummed = [tf.zeros_like(weight) for weight in weights]
        return _over_tiles(expert, self.size, add_tile, [d_x_OM, *unsummed])

    def _tile_gradients(
        self, x_ZM: tf.Tensor, weights: Sequence[tf.Tensor], d_ZM: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients by a tile's rows and by one expert's weights."""
        factors = [x_ZM, *weights]
        with tf.GradientTape() as tape:
            tape.watch(factors)
            outputs_ZM = self.experts.outputs(x_ZM, weights, self.matmul)
        return tape.gradient(outputs_ZM, factors, d_ZM)


def _over_experts(
    bounds_112: tf.Tensor,
    expert_11O: tf.Tensor,
    num_own: int,
    visit: Callable[[_Expert, list[tf.Tensor]], list[tf.Tensor]],
    carried: list[tf.Tensor],
) -> list[tf.Tensor]:
    """Visits the partition's experts that have assignments; returns what the last visit returns."""
    begin, end = tf.unstack(tf.reshape(bounds_112, [2]))
    expert_O = tf.reshape(expert_11O, [-1])

    def next_expert(begin: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
        """Visits the expert that the assignment at `begin` has."""
        expert = read_at(expert_O, begin, 1)
        after = count_true(expert_O <= expert)

        # Partitions have equal numbers of consecutive experts.
        own = tf.reshape(expert % num_own, [])
        return [after, *visit(_Expert(own, begin, after), list(carried))]

    _, *carried = tf.while_loop(lambda start, *_: start < end, next_expert, [begin, *carried])
    return carried


def _over_tiles(
    expert: _Expert,
    size: int,
    visit: Callable[[tf.Tensor, list[tf.Tensor]], list[tf.Tensor]],
    carried: list[tf.Tensor],
) -> list[tf.Tensor]:
    """Visits where an expert's tiles start; returns what the last visit returns."""

    def next_tile(start: tf.Tensor, *carried: tf.Tensor) -> list[tf.Tensor]:
        return [start + size, *visit(start, list(carried))]

    _, *carried = tf.while_loop(
        lambda start, *_: start < expert.end, next_tile, [expert.begin, *carried]
    )
    return carried


def _by_assignment(rows_OM: tf.Tensor, position_11J: tf.Tensor) -> tf.Tensor:
    """Returns rows in the order of assignments, from that of experts: [1, 1, J, M]."""
    rows_JM = tf.gather(rows_OM, tf.reshape(position_11J, [-1]))
    return tf.reshape(rows_JM, [1, 1, *rows_JM.shape])


def count_true(is_true: tf.Tensor) -> tf.Tensor:
    """Returns how many elements of the last dim are true."""
    return tf.reduce_sum(tf.cast(is_true, tf.int32), -1)
