"""Top-2 gating with auxiliary loss: Algorithm 1 as pure functions, for all groups at once.

G groups, S tokens of a group, E experts, C capacity of an expert in a group. A name's suffix gives
its dims: `gates_GSE`. All floats are float32; masks are floats, 0 or 1. Lines are Algorithm 1's.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable

from lingvo_gshard.core.configured import Configured
from lingvo_gshard.core.hyperparams import setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.numerics import PLAIN, Numerics
from lingvo_gshard.layers.routing import Choice, Gates, at_least_one, routing

ALWAYS = -1.0  # Below any gate: every token asks for its second expert.


class SecondExpert(enum.Enum):
    """Which tokens ask for their second expert, which takes them while it has room."""

    RANDOM = "random"  # Each with probability 2 * g2 when training (lines 17 to 20), else all.
    COUNTED = "counted"  # As RANDOM, but tokens that do not ask take a place, too (line 22).
    ALL = "all"


class CapacityBy(enum.Enum):
    """The rule for C, an expert's capacity in one group."""

    FACTOR = "factor"  # C = factor * S / E, rounded up.
    TOKENS = "tokens"  # C = S: nothing overflows.


class Capacity(Configured):
    """Computes C. It is at most S, which is room for all tokens."""

    class Params(Configured.Params):
        by: CapacityBy = setting(CapacityBy.FACTOR, "The rule.")
        factor: float | None = setting(
            None,
            "C * E / S by FACTOR, and in TOKENS' rounds; None for k, a token's experts: 2 (2.2).",
        )
        multiple_of: int = setting(
            1, "C by factor is rounded up to a multiple of this; 4 in Lingvo."
        )

    p: Params

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        factor = self.p.factor
        self._check_setting("factor", factor is None or factor > 0, "above 0")
        self._check_setting("multiple_of", self.p.multiple_of >= 1, "1 or more")

    def places(self, group_size: int, num_experts: int, k: int = 2) -> int:
        """Returns C of each expert in a group of `group_size` tokens, which choose k each."""
        if self.p.by is CapacityBy.TOKENS:
            return group_size
        return self.even_places(group_size, num_experts, k)

    def factor(self, k: int) -> float:
        """Returns C * E / S by FACTOR for tokens that choose k experts each."""
        return k if self.p.factor is None else self.p.factor

    def even_places(self, group_size: int, num_experts: int, k: int = 2) -> int:
        """Returns C by FACTOR, and of each round in which an MoE layer dispatches by TOKENS."""
        share = self.factor(k) * group_size / num_experts
        # Rounded first, so that 1.1 * 100 / 10 is 11 and not 12.
        places = math.ceil(round(share, 9))

        # Few places overflow even where experts are balanced: see repro/tables/capacity.py.
        multiple = self.p.multiple_of
        places = multiple * math.ceil(places / multiple)
        return min(group_size, places)


def top2_gating(
    logits_GSE: tf.Tensor,
    valid_GS: tf.Tensor,
    capacity: int,
    *,
    second_above: tf.Tensor | float = ALWAYS,
    all_counted: bool = False,
    router_loss: tf.Tensor | None = None,
    numerics: Numerics = PLAIN,
    tokens_of_mean: Callable[[tf.Tensor], tf.Tensor] = at_least_one,
) -> Gates:
    """Applies Algorithm 1 to all groups at once.

    Args:
      logits_GSE: The products wg * x.
      valid_GS: 1 for tokens, 0 for padding, which neither chooses experts nor takes capacity.
      capacity: C, the places of an expert for the tokens of one group.
      second_above: A token asks for its second expert where g2 exceeds this number: [G, S], the
        rnd / 2 of lines 17 and 19; or ALWAYS.
      all_counted: Whether a token that does not ask takes a place all the same, as in line 22. If
        not, no place is taken, to "conserve the overall expert capacity" (2.2), as in Lingvo.
      router_loss: What the layer adds to the loss besides l_aux, a scalar.
      numerics: Context.numerics, by which the gradient may keep experts and positions.
      tokens_of_mean: Context.tokens_of_mean.
    """
    gates_GSE = tf.nn.softmax(logits_GSE)  # line 2

    # Lines 5 and 15: the two choices, as indices and as one-hot masks.
    first_GS, second_GS = top2(gates_GSE)
    first_GS = numerics.once("GS", first_GS)
    second_GS = numerics.once("GS", second_GS)
    num_experts = logits_GSE.shape[-1]
    first_GSE = tf.one_hot(first_GS, num_experts) * valid_GS[..., None]
    second_GSE = tf.one_hot(second_GS, num_experts) * valid_GS[..., None]
    if num_experts == 1:  # A single expert leaves no second choice.
        second_GSE = tf.zeros_like(second_GSE)
    g1_GS, g2_GS = normalized_gates(gates_GSE, first_GSE, second_GSE, valid_GS)

    # Lines 7 to 11: the first choices of all tokens take their places, in order.
    count_GE = tf.reduce_sum(first_GSE, 1)  # c_E after line 12
    first_positions_GS = positions(first_GSE, first_GSE, tf.zeros_like(count_GE))
    first_positions_GS = numerics.once("GS", first_positions_GS)
    first = choice_of(first_GSE, first_GS, g1_GS, first_positions_GS, 1.0, capacity)

    # Lines 17 to 22: the second choices, of the tokens that ask for one, take the places after.
    asked_GS = tf.cast(g2_GS > second_above, tf.float32)  # 2 * g2 > rnd
    counted_GSE = second_GSE if all_counted else second_GSE * asked_GS[..., None]
    second_positions_GS = positions(second_GSE, counted_GSE, count_GE)
    second_positions_GS = numerics.once("GS", second_positions_GS)
    second = choice_of(second_GSE, second_GS, g2_GS, second_positions_GS, asked_GS, capacity)

    statistics = routing(
        (first, second),
        valid_GS,
        auxiliary_loss(gates_GSE, first_GSE, valid_GS),  # lines 3 and 13
        entropy(logits_GSE, gates_GSE),
        own_GS={
            "overflow_first": first.wanted_GS - first.kept_GS,
            "overflow_second": second.wanted_GS - second.kept_GS,
            "second_dispatched": second.kept_GS,
        },
        router_loss=router_loss,
        tokens_of_mean=tokens_of_mean,
    )
    return Gates((first, second), statistics)


def top2(gates_GSE: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns first and second experts, int32 [G, S] (lines 5 and 15); lower indices win ties."""
    first_GS = tf.argmax(gates_GSE, -1, output_type=tf.int32)

    # The first choice falls below every gate, even one that underflowed to 0.
    rest_GSE = gates_GSE - 2.0 * tf.one_hot(first_GS, gates_GSE.shape[-1])
    return first_GS, tf.argmax(rest_GSE, -1, output_type=tf.int32)


def normalized_gates(
    gates_GSE: tf.Tensor, first_GSE: tf.Tensor, second_GSE: tf.Tensor, valid_GS: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns g1 / (g1 + g2) and g2 / (g1 + g2) of the chosen experts, [G, S] (lines 6 and 16)."""
    g1_GS = tf.reduce_sum(gates_GSE * first_GSE, -1)
    g2_GS = tf.reduce_sum(gates_GSE * second_GSE, -1)
    total_GS = g1_GS + g2_GS + (1.0 - valid_GS)  # 0 / 1 for padding, not 0 / 0.
    return g1_GS / total_GS, g2_GS / total_GS


def positions(mask_GSE: tf.Tensor, counted_GSE: tf.Tensor, taken_GE: tf.Tensor) -> tf.Tensor:
    """Returns positions in the buffers of the experts that the mask chooses, int32 [G, S].

    These are the counters c_E of lines 7 to 11 and 18 to 22, which start at `taken_GE` and count,
    in the order of the sequence, the choices in `counted_GSE`.
    """
    before_GSE = tf.cumsum(counted_GSE, axis=1, exclusive=True) + taken_GE[:, None]
    return tf.cast(tf.reduce_sum(before_GSE * mask_GSE, -1), tf.int32)


def auxiliary_loss(gates_GSE: tf.Tensor, first_GSE: tf.Tensor, valid_GS: tf.Tensor) -> tf.Tensor:
    """Returns l_aux = 1/E * sum_e c_e/S * m_e (line 13), averaged over the groups.

    c_e counts the first choices of expert e, and m_e is its mean gate (line 3). Padding counts
    neither in these nor in S. Perfect balance gives 1 / E^2: see Routing.balance_loss.
    """
    size_G = tf.maximum(tf.reduce_sum(valid_GS, 1), 1.0)
    m_GE = tf.reduce_sum(gates_GSE * valid_GS[..., None], 1) / size_G[:, None]
    c_GE = tf.reduce_sum(first_GSE, 1) / size_G[:, None]  # c_e / S
    return tf.reduce_mean(c_GE * m_GE)


def entropy(logits_GSE: tf.Tensor, gates_GSE: tf.Tensor) -> tf.Tensor:
    """Returns the entropy of gates g = softmax(z) in nats, log sum exp z - sum g * z: [G, S]."""
    # The largest gate is exp(max z) / sum exp z.
    log_sum_exp_GS = tf.reduce_max(logits_GSE, -1) - tf.math.log(tf.reduce_max(gates_GSE, -1))
    return log_sum_exp_GS - tf.reduce_sum(gates_GSE * logits_GSE, -1)


def choice_of(
    mask_GSE: tf.Tensor,
    expert_GS: tf.Tensor,
    gate_GS: tf.Tensor,
    position_GS: tf.Tensor,
    asked: tf.Tensor | float,
    capacity: int,
) -> Choice:
    """Returns the Choice of tokens that ask for an expert where `asked` is 1; see positions."""
    wanted_GS = tf.reduce_sum(mask_GSE, -1) * asked
    kept_GS = wanted_GS
    if capacity < mask_GSE.shape[1]:  # Else all fit, and XLA drops the unused positions.
        kept_GS = wanted_GS * tf.cast(position_GS < capacity, tf.float32)  # lines 8 and 19
    return Choice(mask_GSE, expert_GS, gate_GS, position_GS, wanted_GS, kept_GS)
