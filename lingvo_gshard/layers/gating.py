"""Top-2 gating with auxiliary loss: Algorithm 1, for all groups at once, as pure functions.

G groups, S tokens of a group, E experts, C capacity of an expert in a group. Suffixes give dims:
`gates_GSE`. All floats are float32; masks are floats that hold 0 or 1.
"""

from __future__ import annotations

import dataclasses
import enum
import math

import tensorflow as tf


class SecondExpert(enum.Enum):
    """When a token goes to its second expert."""

    RANDOM = "random"  # with probability 2 * g2 (lines 17 to 20)
    ALL = "all"  # always


@dataclasses.dataclass(frozen=True)
class Choice:
    """The tokens' first (or second) experts.

    Attributes:
      mask_GSE: 1 at the chosen expert; all 0 for padding.
      gate_GS: its gate, normalized over the two choices (lines 6 and 16).
      position_GS: int32, the place in the expert's buffer, which may be C or more.
      kept_GS: 1 where the token is dispatched.
    """

    mask_GSE: tf.Tensor
    gate_GS: tf.Tensor
    position_GS: tf.Tensor
    kept_GS: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Gating:
    """What Algorithm 1 gives for all groups, and what it did.

    Attributes:
      combine_GSEC: combine weights; non-zero where token S of group G sits at place C of expert E.
      aux_loss: scalar, line 13, the mean over groups.
      load_E: tokens dispatched to each expert, over their mean: 1 everywhere when balanced.
      overflow: scalar, the share of tokens that no expert took.
    """

    combine_GSEC: tf.Tensor
    aux_loss: tf.Tensor
    load_E: tf.Tensor
    overflow: tf.Tensor


def capacity(factor: float | None, group_size: int, num_experts: int) -> int:
    """C, an expert's capacity in one group: factor * S / E rounded up; None never overflows.

    The paper's factor is 2 (section 2.2: "2N / (G * E)").
    """
    if factor is None:
        return group_size
    return min(group_size, math.ceil(factor * group_size / num_experts))


def top2_gating(
    logits_GSE: tf.Tensor,
    real_GS: tf.Tensor,
    capacity: int,
    *,
    uniform_GS: tf.Tensor | None = None,
) -> Gating:
    """Algorithm 1, with paddings that choose no expert and take no capacity.

    Args:
      logits_GSE: wg * x.
      real_GS: 1 for a token, 0 for padding.
      capacity: C.
      uniform_GS: the random numbers of line 17, in [0, 1); None dispatches to every second
        expert that has room.

    Returns:
      The combine weights, the auxiliary loss and the routing metrics.
    """
    gates_GSE = tf.nn.softmax(logits_GSE)  # line 2
    first_GSE, second_GSE = top2_masks(gates_GSE, real_GS)
    g1_GS = tf.reduce_sum(gates_GSE * first_GSE, -1)
    g2_GS = tf.reduce_sum(gates_GSE * second_GSE, -1)
    total_GS = g1_GS + g2_GS + (1.0 - real_GS)  # Padding has no gates: 0 / 1, not 0 / 0.

    count_GE = tf.reduce_sum(first_GSE, 1)  # c_E after line 12
    first = _choice(first_GSE, g1_GS / total_GS, tf.zeros_like(count_GE), capacity)
    second = _choice(second_GSE, g2_GS / total_GS, count_GE, capacity)
    if uniform_GS is not None:
        dispatched = tf.cast(2.0 * second.gate_GS > uniform_GS, tf.float32)  # line 19
        second = dataclasses.replace(second, kept_GS=second.kept_GS * dispatched)
    return Gating(
        combine_GSEC=combine_weights(first, capacity) + combine_weights(second, capacity),
        aux_loss=auxiliary_loss(gates_GSE, first_GSE, real_GS),
        load_E=_load(first, second),
        overflow=_overflow(first, second, real_GS),
    )


def top2_masks(gates_GSE: tf.Tensor, real_GS: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """One-hot first and second experts (lines 5, 15), all 0 for padding; ties go to the lower.

    With a single expert there is no second one.
    """
    num_experts = gates_GSE.shape[-1]
    best_GSE = tf.one_hot(tf.argmax(gates_GSE, -1, output_type=tf.int32), num_experts)
    # Below every gate, so that an expert whose gate is 0 still comes before the first choice.
    rest_GSE = gates_GSE - 2.0 * best_GSE
    next_GSE = tf.one_hot(tf.argmax(rest_GSE, -1, output_type=tf.int32), num_experts)
    if num_experts == 1:
        next_GSE = tf.zeros_like(next_GSE)
    return best_GSE * real_GS[..., None], next_GSE * real_GS[..., None]


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


def combine_weights(choice: Choice, capacity: int) -> tf.Tensor:
    """The [G, S, E, C] part of the combine weights that one choice gives (lines 9 and 20)."""
    weight_GSE = choice.mask_GSE * (choice.gate_GS * choice.kept_GS)[..., None]
    place_GSC = tf.one_hot(choice.position_GS, capacity)
    return weight_GSE[..., None] * place_GSC[:, :, None, :]


def _choice(mask_GSE: tf.Tensor, gate_GS: tf.Tensor, taken_GE: tf.Tensor, capacity: int) -> Choice:
    position_GS = positions(mask_GSE, taken_GE)
    kept_GS = tf.cast(position_GS < capacity, tf.float32) * tf.reduce_sum(mask_GSE, -1)
    return Choice(mask_GSE, gate_GS, position_GS, kept_GS)


def _load(first: Choice, second: Choice) -> tf.Tensor:
    sent_GSE = first.mask_GSE * first.kept_GS[..., None]
    sent_GSE += second.mask_GSE * second.kept_GS[..., None]
    sent_E = tf.reduce_sum(sent_GSE, [0, 1])
    return sent_E / tf.maximum(tf.reduce_mean(sent_E), 1.0)


def _overflow(first: Choice, second: Choice, real_GS: tf.Tensor) -> tf.Tensor:
    nowhere_GS = real_GS * (1.0 - first.kept_GS) * (1.0 - second.kept_GS)
    return tf.reduce_sum(nowhere_GS) / tf.maximum(tf.reduce_sum(real_GS), 1.0)
