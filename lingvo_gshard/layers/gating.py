"""Top-2 gating with auxiliary loss: Algorithm 1, for all groups at once, as pure functions.

G groups, S tokens of a group, E experts, C capacity of an expert in a group. Suffixes give dims:
`gates_GSE`. All floats are float32; masks are floats that hold 0 or 1.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.hyperparams import InstantiableParams

ALWAYS = -1.0  # A number below any gate.


class SecondExpert(enum.Enum):
    """When a token goes to its second expert, if that has room."""

    RANDOM = "random"  # With probability 2 * g2 (lines 17 to 20) when training, otherwise always.
    ALL = "all"  # Always.
    THRESHOLD = "threshold"  # When g2 exceeds a threshold.


class CapacityBy(enum.Enum):
    """What C, an expert's capacity in one group, is given by."""

    FACTOR = "factor"  # factor * S / E, rounded up.
    NUMBER = "number"  # Places.
    TOKENS = "tokens"  # As many places as the group has tokens: nothing overflows.


class Capacity:
    """C by one of the three rules; never more than S, which is room for all."""

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = InstantiableParams(cls)
        p.Define("by", CapacityBy.FACTOR, "The rule.")
        p.Define("factor", 2.0, "Of FACTOR; the paper's is 2 (section 2.2: 2N / (G * E)).")
        p.Define("number", 1, "Of NUMBER.")
        return p

    def __init__(self, params: hyperparams.Params) -> None:
        """Raises ValueError unless factor and number are positive."""
        self.p = p = params.Copy().Freeze()
        if p.factor <= 0 or p.number < 1:
            raise ValueError(
                f"Capacity: a factor above 0 and a number of 1 or more are expected, got factor "
                f"{p.factor} and number {p.number}."
            )

    def places(self, group_size: int, num_experts: int) -> int:
        """C of one expert in a group of S tokens."""
        match self.p.by:
            case CapacityBy.FACTOR:
                return min(group_size, math.ceil(self.p.factor * group_size / num_experts))
            case CapacityBy.NUMBER:
                return min(group_size, self.p.number)
            case _:
                return group_size


@dataclasses.dataclass(frozen=True)
class Choice:
    """The tokens' first (or second) experts.

    Attributes:
      mask_GSE: 1 at the chosen expert; all 0 for padding.
      expert_GS: int32, the same as an index; any for padding.
      gate_GS: its gate, normalized over the two choices (lines 6 and 16).
      position_GS: int32, the place in the expert's buffer, which may be C or more.
      wanted_GS: 1 where the token asks for a place.
      kept_GS: 1 where it has got one and is dispatched.
    """

    mask_GSE: tf.Tensor
    expert_GS: tf.Tensor
    gate_GS: tf.Tensor
    position_GS: tf.Tensor
    wanted_GS: tf.Tensor
    kept_GS: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Routing:
    """How one layer routed its tokens, paddings apart. Scalars, but for load_E.

    Attributes:
      aux_loss: line 13, the mean over groups.
      load_E: tokens dispatched to each expert, over their mean: 1 everywhere when balanced.
      overflow: the share of tokens that no expert took.
      overflow_first: the share of tokens whose first expert was full.
      overflow_second: the share of tokens that asked for their second expert and found it full.
      second_dispatched: the share of tokens that their second expert took.
      max_load: the load of the busiest expert.
      idle_experts: the number of experts with no token.
      entropy: of the gates of a token, in nats, the mean over tokens.
    """

    aux_loss: tf.Tensor
    load_E: tf.Tensor
    overflow: tf.Tensor
    overflow_first: tf.Tensor
    overflow_second: tf.Tensor
    second_dispatched: tf.Tensor
    max_load: tf.Tensor
    idle_experts: tf.Tensor
    entropy: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Gating:
    """What Algorithm 1 gives for all groups: both choices of each token, and what that did."""

    first: Choice
    second: Choice
    routing: Routing


def top2_gating(
    logits_GSE: tf.Tensor,
    real_GS: tf.Tensor,
    capacity: int,
    *,
    second_above: tf.Tensor | float = ALWAYS,
) -> Gating:
    """Algorithm 1, with paddings that choose no expert and take no capacity.

    Args:
      logits_GSE: wg * x.
      real_GS: 1 for a token, 0 for padding.
      capacity: C.
      second_above: [G, S] or one number; a token asks for its second expert where g2 is above it.
        The rnd / 2 of lines 17 and 19, a threshold, or ALWAYS.
    """
    gates_GSE = tf.nn.softmax(logits_GSE)  # line 2
    first_GS, second_GS = top2(gates_GSE)
    first_GSE = _mask(first_GS, real_GS, gates_GSE)
    second_GSE = _mask(second_GS, real_GS, gates_GSE)
    if gates_GSE.shape[-1] == 1:  # There is no second expert.
        second_GSE = tf.zeros_like(second_GSE)
    g1_GS = tf.reduce_sum(gates_GSE * first_GSE, -1)
    g2_GS = tf.reduce_sum(gates_GSE * second_GSE, -1)
    total_GS = g1_GS + g2_GS + (1.0 - real_GS)  # Padding has no gates: 0 / 1, not 0 / 0.
    g1_GS, g2_GS = g1_GS / total_GS, g2_GS / total_GS  # lines 6 and 16

    count_GE = tf.reduce_sum(first_GSE, 1)  # c_E after line 12
    asks_GS = tf.cast(g2_GS > second_above, tf.float32)  # line 19
    first = Choice(
        first_GSE, first_GS, g1_GS, *_places(first_GSE, tf.zeros_like(count_GE), 1.0, capacity)
    )
    second = Choice(second_GSE, second_GS, g2_GS, *_places(second_GSE, count_GE, asks_GS, capacity))
    aux_loss = auxiliary_loss(gates_GSE, first_GSE, real_GS)
    entropy_GS = entropy(logits_GSE, gates_GSE)
    return Gating(first, second, _routing(aux_loss, entropy_GS, first, second, real_GS))


def top2(gates_GSE: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """First and second experts, int32 [G, S] (lines 5 and 15); ties go to the lower."""
    first_GS = tf.argmax(gates_GSE, -1, output_type=tf.int32)
    # Below every gate, so that an expert whose gate is 0 still comes before the first choice.
    rest_GSE = gates_GSE - 2.0 * tf.one_hot(first_GS, gates_GSE.shape[-1])
    return first_GS, tf.argmax(rest_GSE, -1, output_type=tf.int32)


def positions(mask_GSE: tf.Tensor, taken_GE: tf.Tensor) -> tf.Tensor:
    """Places in the chosen experts' buffers, int32 [G, S].

    The counters c_E of lines 7 to 11 and 18 to 22: in the order of the sequence, one for each
    token that chose the expert, whether it then is dispatched or not; `taken_GE` is where they
    start.
    """
    before_GSE = tf.cumsum(mask_GSE, axis=1, exclusive=True) + taken_GE[:, None]
    return tf.cast(tf.reduce_sum(before_GSE * mask_GSE, -1), tf.int32)


def auxiliary_loss(gates_GSE: tf.Tensor, first_GSE: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
    """Line 13, l_aux = 1/E * sum_e c_e/S * m_e, the mean over the groups.

    c_e counts first choices, m_e is the mean gate (line 3); both and S are over the group's
    tokens that are no padding. Perfect balance gives 1 / E^2: a weight k that is to mean the
    same for any E grows as E^2.
    """
    size_G = tf.maximum(tf.reduce_sum(real_GS, 1), 1.0)
    m_GE = tf.reduce_sum(gates_GSE * real_GS[..., None], 1) / size_G[:, None]
    c_GE = tf.reduce_sum(first_GSE, 1) / size_G[:, None]
    return tf.reduce_mean(c_GE * m_GE)


def entropy(logits_GSE: tf.Tensor, gates_GSE: tf.Tensor) -> tf.Tensor:
    """Of each token's gates = softmax(logits), in nats [G, S]: log sum exp z - sum g * z."""
    log_sum_exp_GS = tf.reduce_max(logits_GSE, -1) - tf.math.log(tf.reduce_max(gates_GSE, -1))
    return log_sum_exp_GS - tf.reduce_sum(gates_GSE * logits_GSE, -1)


def _mask(expert_GS: tf.Tensor, real_GS: tf.Tensor, gates_GSE: tf.Tensor) -> tf.Tensor:
    return tf.one_hot(expert_GS, gates_GSE.shape[-1]) * real_GS[..., None]


def _places(
    mask_GSE: tf.Tensor, taken_GE: tf.Tensor, asks: tf.Tensor | float, capacity: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Position, wanted and kept of a Choice, each [G, S]."""
    position_GS = positions(mask_GSE, taken_GE)
    wanted_GS = tf.reduce_sum(mask_GSE, -1) * asks
    if capacity >= mask_GSE.shape[1]:  # Room for all: who needs no positions need not count them.
        return position_GS, wanted_GS, wanted_GS
    return position_GS, wanted_GS, wanted_GS * tf.cast(position_GS < capacity, tf.float32)


def _routing(
    aux_loss: tf.Tensor, entropy_GS: tf.Tensor, first: Choice, second: Choice, real_GS: tf.Tensor
) -> Routing:
    sent_GSE = first.mask_GSE * first.kept_GS[..., None]
    sent_GSE += second.mask_GSE * second.kept_GS[..., None]
    by_token = [
        real_GS,
        real_GS * (1.0 - first.kept_GS) * (1.0 - second.kept_GS),
        first.wanted_GS - first.kept_GS,
        second.wanted_GS - second.kept_GS,
        second.kept_GS,
        real_GS * entropy_GS,
    ]
    by_group = [tf.reduce_sum(sent_GSE, 1), tf.reduce_sum(tf.stack(by_token, -1), 1)]
    # In one tensor, so that groups on several devices are summed by one all-reduce.
    totals = tf.reduce_sum(tf.concat(by_group, -1), 0)
    sent_E, (num_tokens, *sums) = totals[: -len(by_token)], tf.unstack(totals[-len(by_token) :])
    load_E = sent_E / tf.maximum(tf.reduce_mean(sent_E), 1.0)
    means = [total / tf.maximum(num_tokens, 1.0) for total in sums]
    overflow, overflow_first, overflow_second, second_dispatched, mean_entropy = means
    return Routing(
        aux_loss=aux_loss,
        load_E=load_E,
        overflow=overflow,
        overflow_first=overflow_first,
        overflow_second=overflow_second,
        second_dispatched=second_dispatched,
        max_load=tf.reduce_max(load_E),
        idle_experts=tf.reduce_sum(tf.cast(sent_E == 0.0, tf.float32)),
        entropy=mean_entropy,
    )
