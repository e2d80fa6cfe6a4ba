"""Experts without a capacity: each computes exactly the tokens that chose it. No gradients.

An assignment is a token with one of its two choices. Assignments are sorted by expert, and each
partition computes those of its own experts, one expert after the other, in tiles of a fixed size.
So nothing overflows, and idle experts and padding cost nothing.

Partitions that share the experts gather each other's tokens (an all-gather), compute the
assignments of their own experts, and send each token its experts' outputs (an all-to-all).

G groups, S tokens of a group, M model, H hidden, E experts: the letters of sharding/layout.py.
These are local:

  W  the partitions over which the experts are split
  X  the experts of one such partition: E / W
  Y  the parts that the tokens are still in once the partitions of the experts have gathered them:
     1 if the groups are split as the experts are, and D / W on D devices with copies of the experts
  I  the tokens of such a part: G * S / Y
  J  the assignments of such a part: 2 * I, both of a token side by side
  Z  the rows of a tile, which are multiplied at a time
  O  the rows of outputs: J + Z, since the last tile may run over the end

On 8 devices with 4 experts, for example, W is 4, X is 1 and Y is 2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.gating import Gating
from lingvo_gshard.layers.products import Arithmetic
from lingvo_gshard.layers.slices import read_at, write_at
from lingvo_gshard.sharding.annotator import Annotator


@dataclasses.dataclass(frozen=True)
class Experts:
    """What the experts of a layer compute with."""

    weights: dict[str, tf.Tensor]  # wi [E, M, H], wo [E, H, M] and, if gated, wi_gate [E, M, H].
    # Maps a function that multiplies tokens by the weight of a name to their hidden units.
    hidden_units: Callable[[Callable[[str], tf.Tensor]], tf.Tensor]


def ragged_experts(
    x_GSM: tf.Tensor,
    gates: Gating,
    experts: Experts,
    annotator: Annotator,
    arithmetic: Arithmetic,
) -> tf.Tensor:
    """Returns the outputs of each token's kept choices, summed with its gates: [G, S, M]."""
    num_experts, dim, _ = experts.weights["wi"].shape
    num_groups, group_size, _ = x_GSM.shape
    num_partitions, _ = annotator.factor("EG")

    # Tokens and their choices travel in one tensor, so that a single all-gather moves both.
    choices_GS6 = _encode_choices(gates, num_experts, x_GSM.dtype)
    gathered = _gather_tokens(tf.concat([x_GSM, choices_GS6], -1), annotator)
    x_WYIM, choices_WYI6 = tf.split(gathered, [dim, choices_GS6.shape[-1]], -1)
    expert_WYJ, gate_WYJ = _decode_choices(choices_WYI6)

    outputs_WYJM = _expert_outputs(x_WYIM, expert_WYJ, experts, annotator, arithmetic)

    # A token's output is the sum over its two choices, and over the partitions W, of which those
    # without its experts add 0. From a split over W to one over G is the all-to-all.
    weighted_WYJM = outputs_WYJM * gate_WYJ[..., None]
    outputs_WGS2M = tf.reshape(weighted_WYJM, [num_partitions, num_groups, group_size, 2, dim])
    outputs_WGSM = annotator.annotate(tf.reduce_sum(outputs_WGS2M, 3), "_G__")
    return annotator.annotate(tf.reduce_sum(outputs_WGSM, 0), "GSM")


def tile_size(num_assignments: int, num_experts: int) -> int:
    """Returns Z: a quarter of an expert's even share of J assignments.

    An expert's last tile is half empty on average, which is a ninth of all computed rows. Z is
    within 8 to 128, and at most the number of tokens.
    """
    num_tokens = num_assignments // 2
    quarter = num_assignments // num_experts // 4
    return min(num_tokens, max(8, min(128, quarter)))


def _encode_choices(gates: Gating, num_experts: int, dtype: tf.DType) -> tf.Tensor:
    """Returns six numbers for each token: its two gates, and its two experts as two digits each.

    The digits are those of base 256, which bfloat16 holds exactly. A choice that was not kept has
    the expert E, which does not exist.
    """
    first_GS = tf.where(gates.first.kept_GS > 0, gates.first.expert_GS, num_experts)
    second_GS = tf.where(gates.second.kept_GS > 0, gates.second.expert_GS, num_experts)
    experts_GS2 = tf.stack([first_GS, second_GS], -1)
    gates_GS2 = tf.stack([gates.first.gate_GS, gates.second.gate_GS], -1)

    high_GS2 = tf.cast(experts_GS2 // 256, dtype)
    low_GS2 = tf.cast(experts_GS2 % 256, dtype)
    return tf.concat([tf.cast(gates_GS2, dtype), high_GS2, low_GS2], -1)


def _gather_tokens(rows_GS_: tf.Tensor, annotator: Annotator) -> tf.Tensor:
    """Gathers the rows of each part's tokens: [W, Y, I, ...], equal along W."""
    num_partitions, num_parts = annotator.factor("EG")
    width = rows_GS_.shape[-1]
    rows_YI_ = tf.reshape(rows_GS_, [num_parts, -1, width])
    if num_parts == 1:  # Every device needs all tokens.
        rows_YI_ = annotator.annotate(rows_YI_, "___")

    rows_WYI_ = tf.broadcast_to(rows_YI_, [num_partitions, *rows_YI_.shape])
    return annotator.annotate(rows_WYI_, "EG__")


def _decode_choices(choices_WYI6: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns each assignment's expert, int32 [W, Y, J], and gate, [W, Y, J]: _encode_choices."""
    num_partitions, num_parts = choices_WYI6.shape[:2]

    def assignments(numbers_WYI2: tf.Tensor) -> tf.Tensor:
        return tf.reshape(numbers_WYI2, [num_partitions, num_parts, -1])

    gate_WYI2, high_WYI2, low_WYI2 = tf.split(choices_WYI6, 3, -1)
    gate_WYJ = assignments(gate_WYI2)
    high_WYJ = assignments(high_WYI2)
    low_WYJ = assignments(low_WYI2)
    expert_WYJ = tf.cast(high_WYJ, tf.int32) * 256 + tf.cast(low_WYJ, tf.int32)
    return expert_WYJ, gate_WYJ


def _expert_outputs(
    x_WYIM: tf.Tensor,
    expert_WYJ: tf.Tensor,
    experts: Experts,
    annotator: Annotator,
    arithmetic: Arithmetic,
) -> tf.Tensor:
    """Returns the outputs of partition W's experts, [W, Y, J, M]; 0 for other experts' tokens."""
    num_partitions, num_parts, num_assignments = expert_WYJ.shape
    num_experts = experts.weights["wi"].shape[0]
    num_own = num_experts // num_partitions
    size = tile_size(num_assignments, num_experts)

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

    rows_WYOM = tf.zeros(
        [num_partitions, num_parts, num_assignments + size, x_WYIM.shape[-1]], x_WYIM.dtype
    )
    arguments = [
        (bounds_WY2, "EG_"),
        (padded(by_expert.sorted_keys, num_experts), "EG_"),
        (padded(by_expert.sorted_values // 2, 0), "EG_"),
        (position_WYJ, "EG_"),
        (x_WYIM, "EG__"),
        (rows_WYOM, "EG__"),
    ]
    # Whole: a product over a dim that is split here would be left without its sum.
    arguments += [(weight, "E__") for weight in experts.weights.values()]
    local = functools.partial(_local_outputs, size, arithmetic.matmul_weight, experts)
    outputs_WYJM = annotator.locally(local, arguments, "EG__")

    is_own_WYJ = expert_WYJ // num_own == tf.range(num_partitions)[:, None, None]
    return tf.where(is_own_WYJ[..., None], outputs_WYJM, tf.zeros([], outputs_WYJM.dtype))


def _local_outputs(
    size: int,
    matmul: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    experts: Experts,
    bounds_112: tf.Tensor,
    expert_11O: tf.Tensor,
    token_11O: tf.Tensor,
    position_11J: tf.Tensor,
    x_11IM: tf.Tensor,
    rows_11OM: tf.Tensor,
    *own_weights: tf.Tensor,
) -> tf.Tensor:
    """One partition's _expert_outputs; arbitrary for assignments to other partitions' experts.

    Args:
      size: Z.
      matmul: Multiplies rows with a weight.
      experts: The experts of all partitions.
      bounds_112: Where this partition's assignments begin and end in the order of the next two.
      expert_11O: The expert of each assignment, sorted.
      token_11O: The token of each assignment, in the same order.
      position_11J: Where each assignment is in that order.
      x_11IM: The tokens.
      rows_11OM: Zeros, which the outputs replace.
      *own_weights: The weights of this partition's own experts, in the order of `experts`.
    """
    begin, end = tf.unstack(tf.reshape(bounds_112, [2]))
    expert_O = tf.reshape(expert_11O, [-1])
    token_O = tf.reshape(token_11O, [-1])
    x_IM = tf.reshape(x_11IM, x_11IM.shape[2:])
    rows_OM = tf.reshape(rows_11OM, rows_11OM.shape[2:])

    def next_expert(begin: tf.Tensor, rows_OM: tf.Tensor) -> list[tf.Tensor]:
        """Computes all assignments of the expert that the one at `begin` has."""
        expert = read_at(expert_O, begin, 1)
        after = _count(expert_O <= expert)

        # Partitions have equal numbers of consecutive experts.
        own = tf.reshape(expert % own_weights[0].shape[0], [])
        weights = {
            name: read_at(weight, own, 1)[0]
            for name, weight in zip(experts.weights, own_weights, strict=True)
        }

        def next_tile(start: tf.Tensor, rows_OM: tf.Tensor) -> list[tf.Tensor]:
            """A tile may run into the next expert's rows, which that expert then overwrites."""
            x_ZM = tf.gather(x_IM, read_at(token_O, start, size))
            h_ZH = experts.hidden_units(lambda name: matmul(x_ZM, weights[name]))
            outputs_ZM = matmul(h_ZH, weights["wo"])
            return [start + size, write_at(rows_OM, outputs_ZM, start, axis=0)]

        _, rows_OM = tf.while_loop(lambda start, _: start < after, next_tile, [begin, rows_OM])
        return [after, rows_OM]

    _, rows_OM = tf.while_loop(lambda start, _: start < end, next_expert, [begin, rows_OM])

    # Back from the order of experts to that of assignments.
    rows_JM = tf.gather(rows_OM, tf.reshape(position_11J, [-1]))
    return tf.reshape(rows_JM, [1, 1, *rows_JM.shape])


def _count(is_true: tf.Tensor) -> tf.Tensor:
    """Returns how many elements of the last dim are true."""
    return tf.reduce_sum(tf.cast(is_true, tf.int32), -1)
