"""Experts without a capacity: each computes exactly the tokens that chose it.

An assignment is a token with one of its k choices. Assignments are sorted by expert, and each
partition computes those of its own experts, one expert after the other, in tiles of a fixed size.
So nothing overflows, and idle experts and padding cost nothing.

Partitions that share the experts gather each other's tokens (an all-gather), compute the
assignments of their own experts, and send each token its experts' outputs (an all-to-all).

The gradient takes the same tiles in the same order. It computes the hidden units of a tile again,
and so keeps nothing but the tokens.

G groups, S tokens of a group, M model, H hidden, E experts: the letters of sharding/layout.py.
These are local:

  W  the partitions over which the experts are split
  X  the experts of one such partition: E / W
  Y  the parts that the tokens are still in once the partitions of the experts have gathered them:
     1 if the groups are split as the experts are, and D / W on D devices with copies of the experts
  I  the tokens of such a part: G * S / Y
  J  the assignments of such a part: k * I, all of a token side by side
  Z  the rows of a tile, which are multiplied at a time
  O  the rows of outputs: J + Z, since the last tile may run over the end

On 8 devices with 4 experts, for example, W is 4, X is 1 and Y is 2.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.products import Arithmetic, with_bias
from lingvo_gshard.layers.routing import Gates
from lingvo_gshard.layers.slices import read_at, write_at
from lingvo_gshard.layers.stored_weights import Weight
from lingvo_gshard.sharding.annotator import Annotator


@dataclasses.dataclass(frozen=True)
class Experts:
    """What the experts of a layer compute with."""

    # wi [E, M, H], wo [E, H, M] and, if gated, wi_gate [E, M, H], or what they are kept as; perhaps
    # the bias of each of them, such as wi_bias [E, 1, H].
    weights: dict[str, Weight]
    # Maps a function that multiplies tokens by the weight of a name to their hidden units.
    hidden_units: Callable[[Callable[[str], tf.Tensor]], tf.Tensor]

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The weights as tensors [E, ...], in order: one each, or those that it is kept as."""
        tensors = []
        for weight in self.weights.values():
            tensors += NestedMap(weight=weight).Flatten()
        return tensors

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


def ragged_experts(
    x_GSM: tf.Tensor,
    gates: Gates,
    experts: Experts,
    annotator: Annotator,
    arithmetic: Arithmetic,
) -> tf.Tensor:
    """Returns the outputs of each token's kept choices, summed with its gates: [G, S, M]."""
    num_experts = experts.tensors[0].shape[0]
    num_groups, group_size, dim = x_GSM.shape
    num_partitions, _ = annotator.factor("EG")
    k = gates.k

    # Tokens and their choices travel in one tensor, so that a single all-gather moves both.
    choices_GS_ = _encode_choices(gates, num_experts, x_GSM.dtype)
    gathered = _gather_tokens(tf.concat([x_GSM, choices_GS_], -1), annotator)
    x_WYIM, choices_WYI_ = tf.split(gathered, [dim, choices_GS_.shape[-1]], -1)
    expert_WYJ, gate_WYJ = _decode_choices(choices_WYI_)

    outputs_WYJM = _expert_outputs(x_WYIM, expert_WYJ, k, experts, annotator, arithmetic)

    # A token's output is the sum over its choices, and over the partitions W, of which those
    # without its experts add 0. From a split over W to one over G is the all-to-all.
    weighted_WYJM = outputs_WYJM * gate_WYJ[..., None]
    outputs_WGSkM = tf.reshape(weighted_WYJM, [num_partitions, num_groups, group_size, k, dim])
    outputs_WGSM = annotator.annotate(tf.reduce_sum(outputs_WGSkM, 3), "_G__")
    return annotator.annotate(tf.reduce_sum(outputs_WGSM, 0), "GSM")


def tile_size(num_tokens: int, k: int, num_experts: int) -> int:
    """Returns Z: a quarter of an expert's even share of the k assignments of each token.

    An expert's last tile is half empty on average, which is a ninth of all computed rows. Z is
    within 8 to 128, and at most the number of tokens.
    """
    quarter = k * num_tokens // num_experts // 4
    return min(num_tokens, max(8, min(128, quarter)))


def _encode_choices(gates: Gates, num_experts: int, dtype: tf.DType) -> tf.Tensor:
    """Returns 3 * k numbers for each token: its k gates, and its k experts as two digits each.

    The digits are those of base 256, which bfloat16 holds exactly. A choice that was not kept has
    the expert E, which does not exist.
    """
    experts_GSk = tf.stack(
        [tf.where(choice.kept_GS > 0, choice.expert_GS, num_experts) for choice in gates.choices],
        -1,
    )
    gates_GSk = tf.stack([choice.gate_GS for choice in gates.choices], -1)

    high_GSk = tf.cast(experts_GSk // 256, dtype)
    low_GSk = tf.cast(experts_GSk % 256, dtype)
    return tf.concat([tf.cast(gates_GSk, dtype), high_GSk, low_GSk], -1)


def _gather_tokens(rows_GS_: tf.Tensor, annotator: Annotator) -> tf.Tensor:
    """Gathers the rows of each part's tokens: [W, Y, I, ...], equal along W."""
    num_partitions, num_parts = annotator.factor("EG")
    width = rows_GS_.shape[-1]
    rows_YI_ = tf.reshape(rows_GS_, [num_parts, -1, width])
    if num_parts == 1:  # Every device needs all tokens.
        rows_YI_ = annotator.annotate(rows_YI_, "___")

    rows_WYI_ = tf.broadcast_to(rows_YI_, [num_partitions, *rows_YI_.shape])
    return annotator.annotate(rows_WYI_, "EG__")


def _decode_choices(choices_WYI_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each assignment's expert, int32 [W, Y, J], and gate, [W, Y, J]: _encode_choices."""
    num_partitions, num_parts = choices_WYI_.shape[:2]

    def assignments(numbers_WYIk: tf.Tensor) -> tf.Tensor:
        return tf.reshape(numbers_WYIk, [num_partitions, num_parts, -1])

    gate_WYIk, high_WYIk, low_WYIk = tf.split(choices_WYI_, 3, -1)
    gate_WYJ = assignments(gate_WYIk)
    high_WYJ = assignments(high_WYIk)
    low_WYJ = assignments(low_WYIk)
    expert_WYJ = tf.cast(high_WYJ, tf.int32) * 256 + tf.cast(low_WYJ, tf.int32)
    return expert_WYJ, gate_WYJ


def _expert_outputs(
    x_WYIM: tf.Tensor,
    expert_WYJ: tf.Tensor,
    k: int,
    experts: Experts,
    annotator: Annotator,
    arithmetic: Arithmetic,
) -> tf.Tensor:
    """Returns the outputs of partition W's experts, [W, Y, J, M]; 0 for other experts' tokens."""
    num_partitions, num_parts, num_assignments = expert_WYJ.shape
    num_experts = experts.tensors[0].shape[0]
    num_own = num_experts // num_partitions
    size = tile_size(num_assignments // k, k, num_experts)

    # The assignments by expert, and the inverse: where each of them is then.
    index_WYJ = tf.broadcast_to(tf.range(num_assignments), expert_WYJ.shape)
    by_expert = xla.key_value_sort(expert_WYJ, index_WYJ)
    position_WYJ = xla.key_value_sort(by_expert.sorted_values, index_WYJ).sorted_values

    def padded(x_WYJ: tf.Tensor, value: int) -> tf.Tensor:
        """Appends a tile of `value`, which a last tile reads: [W, Y, O]."""
        return tf.concat([x_WYJ, tf.fill([num_partitions, num_parts, size], value)], -1)

    first_own_W11 = num_own * tf.range(num_partitions)[:, None, None]

    def num_before(own: int) -> tf.Tensor:
        """Returns how many assignments come before those of a partition's expert `own`: [W, Y]."""
        return _count(expert_WYJ < first_own_W11 + own)

    # Where the assignments of a partition's own experts begin and end.
    bounds_WY2 = tf.stack([num_before(0), num_before(num_own)], -1)
    order = [
        (bounds_WY2, "EG_"),
        (padded(by_expert.sorted_keys, num_experts), "EG_"),
        (padded(by_expert.sorted_values // k, 0), "EG_"),
        (position_WYJ, "EG_"),
    ]
    rows_shape = [num_partitions, num_parts, num_assignments + size, x_WYIM.shape[-1]]
    tiles = _Tiles(size, experts, arithmetic.matmul_weight)

    def gradients(
        x_WYIM: tf.Tensor, weights: Sequence[tf.Tensor], d_WYJM: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients of x and of the weights, given that of the outputs."""
        # Weights are the experts', of which each part Y of the tokens has gradients of its own.
        unsummed = [
            tf.zeros([num_experts, num_parts, *weight.shape[1:]], weight.dtype)
            for weight in weights
        ]
        arguments = [
            *order,
            (padded(by_expert.sorted_values, 0), "EG_"),
            (x_WYIM, "EG__"),
            (d_WYJM, "EG__"),
            (tf.zeros(rows_shape, x_WYIM.dtype), "EG__"),
        ]
        arguments += [(weight, "E__") for weight in weights]
        arguments += [(zeros, "EG__") for zeros in unsummed]
        dims = ["EG__"] * (1 + len(weights))
        d_x_WYJM, *d_weights = annotator.locally_all(tiles.gradients, arguments, dims)

        # A token's gradient is the sum over its choices, and a weight's that over the parts.
        d_x_WYIkM = tf.reshape(d_x_WYJM, [*x_WYIM.shape[:3], k, x_WYIM.shape[3]])
        return [
            tf.reduce_sum(d_x_WYIkM, 3),
            *[tf.reduce_sum(d_weight, 1) for d_weight in d_weights],
        ]

    @tf.custom_gradient
    def outputs(
        x_WYIM: tf.Tensor, *weights: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        arguments = [*order, (x_WYIM, "EG__"), (tf.zeros(rows_shape, x_WYIM.dtype), "EG__")]
        # Whole: a product over a dim that is split here would be left without its sum.
        arguments += [(weight, "E".ljust(len(weight.shape), "_")) for weight in weights]
        y_WYJM = annotator.locally(tiles.outputs, arguments, "EG__")
        return y_WYJM, functools.partial(gradients, x_WYIM, weights)

    outputs_WYJM = outputs(x_WYIM, *experts.tensors)
    is_own_WYJ = expert_WYJ // num_own == tf.range(num_partitions)[:, None, None]
    return tf.where(is_own_WYJ[..., None], outputs_WYJM, tf.zeros([], outputs_WYJM.dtype))


@dataclasses.dataclass(frozen=True)
class _Expert:
    """An expert of a partition that has assignments, and where they are in the order of experts."""

    own: tf.Tensor  # Its index among the partition's experts; these are int32 scalars.
    begin: tf.Tensor
    end: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _Tiles:
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
        x_11IM: tf.Tensor,
        rows_11OM: tf.Tensor,
        *own_weights: tf.Tensor,
    ) -> tf.Tensor:
        """The partition's _expert_outputs; arbitrary for other partitions' assignments.

        Args:
          bounds_112: Where this partition's assignments begin and end in the order of the next two.
          expert_11O: The expert of each assignment, sorted.
          token_11O: The token of each assignment, in the same order.
          position_11J: Where each assignment is in that order.
          x_11IM: The tokens.
          rows_11OM: Zeros, which the outputs replace.
          *own_weights: The weights of this partition's own experts, in the order of `experts`.
        """
        token_O = tf.reshape(token_11O, [-1])
        x_IM = tf.reshape(x_11IM, x_11IM.shape[2:])
        rows_OM = tf.reshape(rows_11OM, rows_11OM.shape[2:])

        def expert_rows(expert: _Expert, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            """Computes all assignments of one expert."""
            weights = [read_at(weight, expert.own, 1)[0] for weight in own_weights]

            def tile_rows(start: tf.Tensor, carried: list[tf.Tensor]) -> list[tf.Tensor]:
                """A tile may run into the next expert's rows, which that expert then overwrites."""
                (rows_OM,) = carried
                x_ZM = tf.gather(x_IM, read_at(token_O, start, self.size))
                outputs_ZM = self.experts.outputs(x_ZM, weights, self.matmul)
                return [write_at(rows_OM, outputs_ZM, start, axis=0)]

            return _over_tiles(expert, self.size, tile_rows, carried)

        num_own = own_weights[0].shape[0]
        (rows_OM,) = _over_experts(bounds_112, expert_11O, num_own, expert_rows, [rows_OM])
        return _by_assignment(rows_OM, position_11J)

    def gradients(
        self,
        bounds_112: tf.Tensor,
        expert_11O: tf.Tensor,
        token_11O: tf.Tensor,
        position_11J: tf.Tensor,
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
          assignment_11O: The assignments in the order of experts.
          x_11IM: The tokens.
          d_11JM: The gradient of the outputs, 0 for other partitions' assignments.
          rows_11OM: Zeros, which the gradients by x replace.
          *weights_and_zeros: The weights of the partition's own experts, [X, ...], then zeros
            [X, 1, ...] that their gradients replace.
        """
        num_weights = len(self.experts.tensors)
        own_weights = weights_and_zeros[:num_weights]
        zeros = weights_and_zeros[num_weights:]

        # Without the two dims by which partitions were told apart.
        token_O = tf.reshape(token_11O, [-1])
        assignment_O = tf.reshape(assignment_11O, [-1])
        x_IM = tf.reshape(x_11IM, x_11IM.shape[2:])
        d_JM = tf.reshape(d_11JM, d_11JM.shape[2:])

        def expert_gradients(expert: _Expert, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            """Adds up the gradients by one expert's weights, which become a part of all."""
            weights = [read_at(weight, expert.own, 1)[0] for weight in own_weights]

            def tile_gradients(start: tf.Tensor, carried: list[tf.Tensor]) -> list[tf.Tensor]:
                d_x_OM, *d_weights = carried
                x_ZM = tf.gather(x_IM, read_at(token_O, start, self.size))
                d_ZM = tf.gather(d_JM, read_at(assignment_O, start, self.size))

                # Rows of the next expert are no part of this one's gradients.
                is_own_Z = start + tf.range(self.size) < expert.end
                d_ZM = tf.where(is_own_Z[:, None], d_ZM, tf.zeros([], d_ZM.dtype))

                factors = [x_ZM, *weights]
                with tf.GradientTape() as tape:
                    tape.watch(factors)
                    outputs_ZM = self.experts.outputs(x_ZM, weights, self.matmul)
                d_x_ZM, *d_own = tape.gradient(outputs_ZM, factors, d_ZM)

                d_weights = [total + own for total, own in zip(d_weights, d_own, strict=True)]
                return [write_at(d_x_OM, d_x_ZM, start, axis=0), *d_weights]

            # The sums over this expert's tiles, which then take its place in the stacks.
            d_x_OM, *d_stacks = carried
            unsummed = [tf.zeros_like(weight) for weight in weights]
            d_x_OM, *d_weights = _over_tiles(expert, self.size, tile_gradients, [d_x_OM, *unsummed])

            d_stacks = [
                write_at(stack, d_weight[None], expert.own, axis=0)
                for stack, d_weight in zip(d_stacks, d_weights, strict=True)
            ]
            return [d_x_OM, *d_stacks]

        # All experts of the partition.
        d_x_OM = tf.reshape(rows_11OM, rows_11OM.shape[2:])
        d_stacks = [
            tf.reshape(zero, weight.shape) for zero, weight in zip(zeros, own_weights, strict=True)
        ]
        num_own = own_weights[0].shape[0]
        d_x_OM, *d_stacks = _over_experts(
            bounds_112, expert_11O, num_own, expert_gradients, [d_x_OM, *d_stacks]
        )

        d_weights = [
            tf.reshape(stack, zero.shape) for stack, zero in zip(d_stacks, zeros, strict=True)
        ]
        return [_by_assignment(d_x_OM, position_11J), *d_weights]


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
        after = _count(expert_O <= expert)

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


def _count(is_true: tf.Tensor) -> tf.Tensor:
    """Returns how many elements of the last dim are true."""
    return tf.reduce_sum(tf.cast(is_true, tf.int32), -1)
