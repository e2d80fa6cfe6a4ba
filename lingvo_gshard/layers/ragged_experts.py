"""Experts without a capacity: each computes exactly the tokens that chose it.

An assignment is a token with one of its k choices. Assignments are sorted by expert, and each
partition computes those of its own experts, one expert after the other, in tiles of a fixed size.
So nothing overflows, and idle experts and padding cost nothing.

Partitions that share the experts gather each other's tokens (an all-gather), compute the
assignments of their own experts (expert_tiles.py), and send each token its experts' outputs (an
all-to-all).

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
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.expert_tiles import Experts, Tiles, count_true
from lingvo_gshard.layers.products import Arithmetic
from lingvo_gshard.layers.routing import Gates
from lingvo_gshard.sharding.annotator import Annotator


def ragged_experts(
    x_GSM: tf.Tensor,
    gates: Gates,
    experts: Experts,
    annotator: Annotator,
    arithmetic: Arithmetic,
) -> tf.Tensor:
    """Returns the outputs of each token's kept choices, summed with its gates: [G, S, M]."""
    num_experts = experts.num_experts
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
    num_partitions, _, num_assignments = expert_WYJ.shape
    num_experts = experts.num_experts
    num_own = num_experts // num_partitions
    size = tile_size(num_assignments // k, k, num_experts)

    order = _sorted_by_expert(expert_WYJ, k, size, num_experts)
    partitions = _Partitions(Tiles(size, experts, arithmetic.matmul_weight), order, k, annotator)

    @tf.custom_gradient
    def outputs(
        x_WYIM: tf.Tensor, *weights: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        y_WYJM = partitions.outputs(x_WYIM, weights)
        return y_WYJM, functools.partial(partitions.gradients, x_WYIM, weights)

    outputs_WYJM = outputs(x_WYIM, *experts.tensors)
    is_own_WYJ = expert_WYJ // num_own == tf.range(num_partitions)[:, None, None]
    return tf.where(is_own_WYJ[..., None], outputs_WYJM, tf.zeros([], outputs_WYJM.dtype))


@dataclasses.dataclass(frozen=True)
class _Order:
    """The assignments of all parts in the order of their experts, int32, and the way back.

    What is sorted ends with a tile of padding, which the last tile may read.
    """

    bounds_WY2: tf.Tensor  # Where the assignments of a partition's own experts begin and end.
    expert_WYO: tf.Tensor  # The experts, sorted; E in the padding.
    token_WYO: tf.Tensor  # The tokens, and the assignments, in that order; 0 in the padding.
    assignment_WYO: tf.Tensor
    position_WYJ: tf.Tensor  # Where each assignment is in that order.


def _sorted_by_expert(expert_WYJ: tf.Tensor, k: int, size: int, num_experts: int) -> _Order:
    """Returns the order of assignments by expert, for tiles of a size."""
    num_partitions, num_parts, num_assignments = expert_WYJ.shape
    num_own = num_experts // num_partitions

    # Sorting the sorted indices again tells where each of them is.
    index_WYJ = tf.broadcast_to(tf.range(num_assignments), expert_WYJ.shape)
    by_expert = xla.key_value_sort(expert_WYJ, index_WYJ)
    position_WYJ = xla.key_value_sort(by_expert.sorted_values, index_WYJ).sorted_values

    first_own_W11 = num_own * tf.range(num_partitions)[:, None, None]

    def num_before(own: int) -> tf.Tensor:
        """Returns how many assignments come before those of a partition's expert `own`: [W, Y]."""
        return count_true(expert_WYJ < first_own_W11 + own)

    bounds_WY2 = tf.stack([num_before(0), num_before(num_own)], -1)

    def padded(x_WYJ: tf.Tensor, value: int) -> tf.Tensor:
        """Appends a tile of `value`: [W, Y, O]."""
        return tf.concat([x_WYJ, tf.fill([num_partitions, num_parts, size], value)], -1)

    return _Order(
        bounds_WY2=bounds_WY2,
        expert_WYO=padded(by_expert.sorted_keys, num_experts),
        token_WYO=padded(by_expert.sorted_values // k, 0),
        assignment_WYO=padded(by_expert.sorted_values, 0),
        position_WYJ=position_WYJ,
    )


@dataclasses.dataclass(frozen=True)
class _Partitions:
    """What all partitions compute, each with its own experts and its own part of the tensors.

    Weights are passed whole: a product over a dim that is split here would be left without its sum.
    """

    tiles: Tiles
    order: _Order
    k: int
    annotator: Annotator

    def outputs(self, x_WYIM: tf.Tensor, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the outputs, [W, Y, J, M]; arbitrary for other partitions' assignments."""
        arguments = [*self._order_dims(), (x_WYIM, "EG__"), (self._rows(x_WYIM), "EG__")]
        arguments += [(weight, _weight_dims(weight)) for weight in weights]
        return self.annotator.locally(self.tiles.outputs, arguments, "EG__")

    def gradients(
        self, x_WYIM: tf.Tensor, weights: Sequence[tf.Tensor], d_WYJM: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the gradients of x and of the weights, given that of the outputs."""
        # Weights are the experts', of which each part Y of the tokens has gradients of its own.
        num_parts = x_WYIM.shape[1]
        unsummed = []
        for weight in weights:
            num_blocks, num_experts, *sizes = weight.shape
            unsummed.append(tf.zeros([num_blocks, num_experts, num_parts, *sizes], weight.dtype))

        arguments = [
            *self._order_dims(),
            (self.order.assignment_WYO, "EG_"),
            (x_WYIM, "EG__"),
            (d_WYJM, "EG__"),
            (self._rows(x_WYIM), "EG__"),
        ]
        arguments += [(weight, _weight_dims(weight)) for weight in weights]
        arguments += [(zeros, "_EG__") for zeros in unsummed]
        dims = ["EG__"] + ["_EG__"] * len(weights)
        d_x_WYJM, *d_weights = self.annotator.locally_all(self.tiles.gradients, arguments, dims)

        # A token's gradient is the sum over its choices, and a weight's that over the parts.
        d_x_WYIkM = tf.reshape(d_x_WYJM, [*x_WYIM.shape[:3], self.k, x_WYIM.shape[3]])
        d_x_WYIM = tf.reduce_sum(d_x_WYIkM, 3)
        return [d_x_WYIM, *[tf.reduce_sum(d_weight, 2) for d_weight in d_weights]]

    def _order_dims(self) -> list[tuple[tf.Tensor, str]]:
        """Returns what both directions need to find rows and weights, with dims."""
        order = self.order
        tensors = [order.bounds_WY2, order.expert_WYO, order.token_WYO, order.position_WYJ]

        # As data, since XLA merges equal constants: one that a loop here and the automatic part
        # have in common gets two shardings, on which the partitioner aborts.
        blocks = self.tiles.experts.blocks
        tensors.append(tf.broadcast_to(blocks, [*order.bounds_WY2.shape[:2], len(blocks)]))
        return [(tensor, "EG_") for tensor in tensors]

    def _rows(self, x_WYIM: tf.Tensor) -> tf.Tensor:
        """Returns the zeros that tiles replace: [W, Y, O, M]."""
        return tf.zeros([*self.order.expert_WYO.shape, x_WYIM.shape[-1]], x_WYIM.dtype)


def _weight_dims(weight: tf.Tensor) -> str:
    """Returns the dims of a weight [R, E, ...], whole but for the experts."""
    return "_E".ljust(len(weight.shape), "_")
