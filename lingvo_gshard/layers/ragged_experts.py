"""Experts without a capacity: each computes exactly the tokens that chose it.

An assignment is a token with one of its k choices. Assignments are sorted by expert, and each
partition computes its own experts' assignments, one expert after the other, in tiles of a fixed
size. So nothing overflows, and idle experts and padding cost nothing.

Partitions that share the experts gather each other's tokens (an all-gather), compute the
assignments of their own experts (expert_tiles.py), and send each token its experts' outputs (an
all-to-all).

G groups, S tokens of a group, M model, H hidden, E experts: the letters of sharding/layout.py.
These are local:

  W  the partitions over which the experts are split
  X  the experts of one such partition: E / W, rounded up
  Y  the parts that the tokens are still in once the partitions of the experts have gathered them:
     1 if the groups are split as the experts are, and D / W on D devices with copies of the experts
  I  the tokens of such a part: G * S / Y
  J  the assignments of such a part: k * I, all of a token side by side
  Z  the rows of a tile, which are multiplied at a time
  O  the rows of outputs: J + Z, since the last tile may run over the end

On 8 devices with 4 experts, for example, W is 4, X is 1 and Y is 2. If W does not divide E, the
weights are padded with experts that no token chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.expert_tiles import Experts, Tiles, count_true
from lingvo_gshard.layers.routing import Gates
from lingvo_gshard.sharding.annotator import Annotator


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Experts that compute their tokens without buffers, as many as there are."""

    capacity: int  # S: a gating has places for all tokens.
    annotator: Annotator

    def outputs(self, x_GSM: tf.Tensor, gates: Gates, experts: Experts) -> tf.Tensor:
        """Returns the outputs of each token's kept choices, weighted by its gates: [G, S, M]."""
        with tf.name_scope("experts"):
            return _outputs(x_GSM, gates, experts, self.annotator)


def _outputs(x_GSM: tf.Tensor, gates: Gates, experts: Experts, annotator: Annotator) -> tf.Tensor:
    num_groups, group_size, dim = x_GSM.shape
    num_partitions, _ = annotator.factor("EG")
    num_own = -(-experts.num_experts // num_partitions)
    k = gates.k

    # Tokens and their choices travel in one tensor, so that a single all-gather moves both.
    choices_GS_ = _encode_choices(gates, num_own * num_partitions, x_GSM.dtype)
    gathered = _gather_tokens(tf.concat([x_GSM, choices_GS_], -1), annotator)
    x_WYIM, choices_WYI_ = tf.split(gathered, [dim, choices_GS_.shape[-1]], -1)
    expert_WYJ, gate_WYJ = _decode_choices(choices_WYI_)

    with experts.numerics.noting():
        outputs_WYJM = _expert_outputs(x_WYIM, expert_WYJ, k, experts, annotator)
    _note(experts, x_GSM, k)

    # A token's output is the sum over its choices, and over the partitions W: the ones without its
    # experts add 0. From a split over W to one over G is the all-to-all.
    weighted_WYJM = outputs_WYJM * gate_WYJ[..., None]
    outputs_WGSkM = tf.reshape(weighted_WYJM, [num_partitions, num_groups, group_size, k, dim])
    outputs_WGSM = annotator.annotate(tf.reduce_sum(outputs_WGSkM, 3), "_G__")
    return annotator.annotate(tf.reduce_sum(outputs_WGSM, 0), "GSM")


def _note(experts: Experts, x_GSM: tf.Tensor, k: int) -> None:
    """Notes the products of all assignments, as if experts had equal numbers of them."""
    note = experts.numerics.note
    num_groups, group_size, dim = x_GSM.shape

    # In place of C places, the mean number of a group's tokens that choose an expert.
    sizes = {
        "G": num_groups,
        "S": group_size,
        "E": experts.num_experts,
        "C": k * group_size / experts.num_experts,
        "M": dim,
        "H": experts.hidden_dim,
    }
    note("GSEC,GSM->EGCM", sizes, is_lookup=True)
    for name, _ in experts.theta.FlattenItems():
        if name.endswith("_bias"):
            continue
        equation = "EGCH,EHM->GECM" if name == "wo" else "EGCM,EMH->EGCH"
        note(equation, sizes)
    note("GSEC,GECM->GSM", sizes, is_lookup=True)


def tile_size(num_tokens: int, k: int, num_experts: int) -> int:
    """Returns Z: a quarter of an expert's even share of the k assignments of each token.

    An expert's last tile is half empty on average, which is a ninth of all computed rows. Z is
    within 8 to 128, and at most the number of tokens.
    """
    quarter = k * num_tokens // num_experts // 4
    return min(num_tokens, max(8, min(128, quarter)))


def _encode_choices(gates: Gates, num_experts: int, dtype: tf.DType) -> tf.Tensor:
    """Returns 3 * k numbers for each token: its k gates, and its k experts as two digits each.

    The digits are of base 256, which bfloat16 holds exactly. A choice that was not kept has the
    expert `num_experts`, which no partition has.
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
    x_WYIM: tf.Tensor, expert_WYJ: tf.Tensor, k: int, experts: Experts, annotator: Annotator
) -> tf.Tensor:
    """Returns the outputs of partition W's experts, [W, Y, J, M]; 0 for other experts' tokens."""
    num_partitions, num_parts, num_assignments = expert_WYJ.shape
    num_own = -(-experts.num_experts // num_partitions)
    size = tile_size(num_assignments // k, k, experts.num_experts)
    tiles = Tiles(size, experts)

    # As data, since XLA merges equal constants: one that a loop here and the automatic part have in
    # common gets two shardings, on which the partitioner aborts.
    blocks = experts.blocks
    order = _sorted_by_expert(expert_WYJ, k, size, num_own)
    order.blocks_n = tf.broadcast_to(blocks, [num_partitions, num_parts, len(blocks)])

    def parts(x_WYIM: tf.Tensor, weights: Sequence[tf.Tensor]) -> NestedMap:
        """Returns what Tiles compute with, of all partitions."""
        rows_WYOM = tf.zeros([*order.expert_O.shape, x_WYIM.shape[-1]], x_WYIM.dtype)
        return NestedMap(order, x_IM=x_WYIM, rows_OM=rows_WYOM, weights=list(weights))

    @tf.custom_gradient
    def outputs(
        x_WYIM: tf.Tensor, *weights: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        whole = parts(x_WYIM, weights)
        y = _on_each(tiles.outputs, whole, NestedMap(y_JM="EG__"), annotator)

        def gradients(d_y_WYJM: tf.Tensor) -> list[tf.Tensor]:
            # Weights are the experts', of which each part Y of the tokens has gradients of its own.
            unsummed = [
                tf.zeros([*weight.shape[:2], num_parts, *weight.shape[2:]], weight.dtype)
                for weight in weights
            ]
            whole = NestedMap(parts(x_WYIM, weights), d_y_JM=d_y_WYJM, d_weights=unsummed)
            d_dims = ["_EG".ljust(len(zeros.shape), "_") for zeros in unsummed]
            dims = NestedMap(d_x_JM="EG__", d_weights=d_dims)
            d = _on_each(tiles.gradients, whole, dims, annotator)

            # A token's gradient is the sum over its choices, and a weight's over the parts.
            d_x_WYIkM = tf.reshape(d.d_x_JM, [*x_WYIM.shape[:3], k, x_WYIM.shape[3]])
            d_weights = [tf.reduce_sum(d_weight, 2) for d_weight in d.d_weights]
            return [tf.reduce_sum(d_x_WYIkM, 3), *d_weights]

        return y.y_JM, gradients

    num_missing = num_own * num_partitions - experts.num_experts
    weights = [_with_idle_experts(stack, num_missing) for stack in experts.stacks]
    outputs_WYJM = outputs(x_WYIM, *weights)
    is_own_WYJ = expert_WYJ // num_own == tf.range(num_partitions)[:, None, None]
    return tf.where(is_own_WYJ[..., None], outputs_WYJM, tf.zeros([], outputs_WYJM.dtype))


def _on_each(
    fn: Callable[[NestedMap], NestedMap],
    whole: NestedMap,
    dims: NestedMap,
    annotator: Annotator,
) -> NestedMap:
    """Applies `fn` to each partition's part of the tensors; returns whole ones of these dims.

    Tensors begin with W and Y, of which a partition has one each, and `fn` sees neither. Weights,
    and zeros for their gradients, begin with R and X instead. They are passed whole: a product over
    a dim that is split here would be left without its sum.
    """
    # All tensors are split by W and Y but the weights, which are split by their experts.
    whole_dims = whole.Transform(lambda tensor: "EG".ljust(len(tensor.shape), "_"))
    whole_dims.weights = ["_E".ljust(len(weight.shape), "_") for weight in whole.weights]
    if "d_weights" in whole:
        whole_dims.d_weights = dims.d_weights

    def on_parts(*parts: tf.Tensor) -> list[tf.Tensor]:
        own = whole.Pack(
            tf.reshape(part, part.shape[2:]) if letters.startswith("EG") else part
            for part, letters in zip(parts, whole_dims.Flatten(), strict=True)
        )
        return [
            tf.reshape(result, [1, 1, *result.shape]) if letters.startswith("EG") else result
            for result, letters in zip(fn(own).Flatten(), dims.Flatten(), strict=True)
        ]

    arguments = list(zip(whole.Flatten(), whole_dims.Flatten(), strict=True))
    return dims.Pack(annotator.locally_all(on_parts, arguments, dims.Flatten()))


def _with_idle_experts(weight: tf.Tensor, count: int) -> tf.Tensor:
    """Returns a weight [R, E, ...] with zeros for further experts, which no token chooses."""
    if count == 0:
        return weight
    padding = [[0, 0] for _ in weight.shape]
    padding[1][1] = count
    return tf.pad(weight, padding)


def _sorted_by_expert(expert_WYJ: tf.Tensor, k: int, size: int, num_own: int) -> NestedMap:
    """Returns the assignments in the order of their experts, for tiles of a size, and the way back.

    These are bounds_2, expert_O, token_O, assignment_O and position_J of expert_tiles.py, int32
    [W, Y, ...]. O ends with a tile of padding, which the last tile may read.
    """
    num_partitions, num_parts, num_assignments = expert_WYJ.shape
    num_experts = num_own * num_partitions

    # Sorting the sorted indices again gives the place of each of them.
    index_WYJ = tf.broadcast_to(tf.range(num_assignments), expert_WYJ.shape)
    by_expert = xla.key_value_sort(expert_WYJ, index_WYJ)
    position_WYJ = xla.key_value_sort(by_expert.sorted_values, index_WYJ).sorted_values

    first_own_W11 = num_own * tf.range(num_partitions)[:, None, None]

    def num_before(own: int) -> tf.Tensor:
        """Returns how many assignments precede a partition's expert `own`: [W, Y]."""
        return count_true(expert_WYJ < first_own_W11 + own)

    bounds_WY2 = tf.stack([num_before(0), num_before(num_own)], -1)

    def padded(x_WYJ: tf.Tensor, value: int) -> tf.Tensor:
        """Appends a tile of `value`: [W, Y, O]."""
        return tf.concat([x_WYJ, tf.fill([num_partitions, num_parts, size], value)], -1)

    return NestedMap(
        bounds_2=bounds_WY2,
        expert_O=padded(by_expert.sorted_keys, num_experts),
        token_O=padded(by_expert.sorted_values // k, 0),
        assignment_O=padded(by_expert.sorted_values, 0),
        position_J=position_WYJ,
    )
