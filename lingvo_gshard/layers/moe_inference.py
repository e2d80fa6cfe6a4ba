"""An MoE layer without a capacity: in evaluation, decoding and RAGGED training no token overflows.

G groups, S tokens of a group, E experts, C capacity, M model, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.expert_tiles import Experts
from lingvo_gshard.layers.ragged_experts import ragged_experts
from lingvo_gshard.layers.routing import Gates
from lingvo_gshard.sharding.annotator import Annotator

# From a gating and the capacity of its buffers to the outputs [G, S, M].
ThroughExperts = Callable[[Gates, int, Context], "tf.Tensor"]

# The rounds that a batch is expected to need: the tokens of the fullest buffer over C.
_LIKELY_ROUNDS = 8


def without_overflow(
    x_GSM: tf.Tensor,
    gates: Gates,
    experts: Experts,
    through_experts: ThroughExperts,
    *,
    capacity: Params,
    context: Context,
    annotator: Annotator,
) -> tf.Tensor:
    """Returns the outputs of all tokens, as if C were S: [G, S, M].

    Buffers of S positions for each expert in each group would be mostly empty. So the tokens are
    computed in one of two other ways, whichever moves less; in training always by ragged experts,
    which have gradients. Raises ValueError if these cannot divide the tokens evenly.

    Args:
      x_GSM: The tokens.
      gates: Their choices for a capacity of S.
      experts: Their weights, and how they compute.
      through_experts: Dispatches the tokens that a gating keeps to buffers of a capacity, applies
        the experts, and combines their outputs to [G, S, M].
      capacity: Params of a Capacity, for buffers that are filled in rounds.
      context: The context of the layer.
      annotator: The partitioning.
    """
    num_groups, group_size, _ = x_GSM.shape
    num_experts = experts.num_experts
    round_capacity = capacity.Instantiate().even_places(group_size, num_experts, gates.k)

    # A round moves whole buffers, however few tokens are left for it.
    num_tokens = num_groups * group_size
    buffer_rows = num_experts * num_groups * round_capacity
    _, num_parts = annotator.factor("EG")  # Y in ragged_experts.py, whose parts are equal.
    if context.training:
        if num_tokens % num_parts:
            raise ValueError(
                f"dispatch=RAGGED: {num_tokens} tokens of a batch are not divisible by the "
                f"{num_parts} parts of the mesh that share no experts."
            )
    elif num_tokens % num_parts or not gathering_moves_less(num_tokens, buffer_rows, annotator):
        return _in_rounds(x_GSM, gates, through_experts, round_capacity, context, annotator)
    with tf.name_scope("experts"):
        return ragged_experts(x_GSM, gates, experts, annotator, context.arithmetic)


def gathering_moves_less(num_tokens: int, buffer_rows: int, annotator: Annotator) -> bool:
    """Returns whether ragged experts move fewer rows of a partition than dispatch in rounds does.

    Ragged experts gather the tokens of all partitions of the experts and send back an output for
    each of them. A round sends a partition's share of all buffers, E * G * C rows, to the experts
    and back. So rounds win on many partitions, and gathering wins on few.
    """
    _, num_parts = annotator.factor("EG")  # Y in ragged_experts.py
    (num_partitions,) = annotator.factor("G")
    gathered_rows = num_tokens / num_parts
    dispatched_rows = _LIKELY_ROUNDS * buffer_rows / num_partitions
    return gathered_rows <= dispatched_rows


def _in_rounds(
    x_GSM: tf.Tensor,
    gates: Gates,
    through_experts: ThroughExperts,
    capacity: int,
    context: Context,
    annotator: Annotator,
) -> tf.Tensor:
    """Dispatches the next C positions of every buffer in each round; returns [G, S, M].

    The fullest buffer decides how many; memory does not grow with the number of partitions.
    """
    occupied = gates.occupied()
    unrecorded = context.unrecorded()  # What a loop computes can't be kept outside it.

    def next_round(start: tf.Tensor, y_GSM: tf.Tensor) -> list[tf.Tensor]:
        window = gates.window(start, capacity)

        # A token's two choices may have their turns in different rounds.
        y_GSM += through_experts(window, capacity, unrecorded)
        return [start + capacity, annotator.annotate(y_GSM, "GSM")]

    zeros_GSM = annotator.annotate(tf.zeros_like(x_GSM), "GSM")
    _, y_GSM = tf.while_loop(
        lambda start, _: start < occupied, next_round, [tf.constant(0), zeros_GSM]
    )
    return y_GSM
