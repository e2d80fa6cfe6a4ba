"""Experts without capacity: each computes the tokens that chose it, and no more. No gradients.

A slot is a token and one of its two choices. Slots are sorted by expert, and each partition takes
those of its own experts, one expert after the other, in tiles of a fixed size. So nothing
overflows, and an idle expert costs nothing, nor does a token that takes none.

Partitions that share the experts get each other's tokens (an all-gather), compute the slots of
their own experts, each with as many tiles as it has, and give each token what these say (an
all-to-all).

G groups, S tokens of a group, M model, H hidden, E experts, X of them on a partition, T slots of a
tile. W ways that experts are split, Q ways that tokens are split besides; of such a part R tokens,
J = 2 * R slots, and P = J + T places, of which the last tile may overrun. Suffixes give dims:
`start_WQ`.
"""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from lingvo_gshard.core.base_layer import Annotator
from lingvo_gshard.layers.cache import write_at
from lingvo_gshard.layers.gating import Gating

_LEAST_TILE, _LARGEST_TILE = 8, 128


def ragged_experts(
    x_GSM: tf.Tensor,
    gates: Gating,
    wi_EMH: tf.Tensor,
    wo_EHM: tf.Tensor,
    annotator: Annotator,
) -> tf.Tensor:
    """What the experts say of each token, weighted by its gates; none is dropped.

    Args:
      x_GSM: the tokens; the products are of their dtype.
      gates: both choices of each token. One that is not kept is left out.
      wi_EMH: the experts' first weights.
      wo_EHM: their second ones.
      annotator: the experiment's.

    Returns:
      [G, S, M].
    """
    num_experts, dim = wi_EMH.shape[:2]
    ways, _ = annotator.factor("EG")
    numbers_GSC = _numbers(gates, num_experts, x_GSM.dtype)
    told_WQRN = _told(tf.concat([x_GSM, numbers_GSC], -1), annotator)
    x_WQRM, numbers_WQRC = tf.split(told_WQRN, [dim, numbers_GSC.shape[-1]], -1)
    expert_WQJ, gate_WQJ = _choices(numbers_WQRC)
    said_WQJM = _said(x_WQRM, expert_WQJ, wi_EMH, wo_EHM, annotator) * gate_WQJ[..., None]
    said_WGS2M = tf.reshape(said_WQJM, [ways, *x_GSM.shape[:2], 2, dim])
    said_WGSM = annotator.annotate(tf.reduce_sum(said_WGS2M, 3), "_G__")
    return annotator.annotate(tf.reduce_sum(said_WGSM, 0), "GSM")


def tile_size(num_slots: int, num_experts: int) -> int:
    """T: a quarter of an expert's even share of J slots, but 8 to 128; never more than the tokens.

    An expert's last tile is half empty then, on the average: a ninth of what is computed.
    """
    quarter = num_slots // num_experts // 4
    return min(num_slots // 2, max(_LEAST_TILE, min(_LARGEST_TILE, quarter)))


def _numbers(gates: Gating, num_experts: int, dtype: tf.DType) -> tf.Tensor:
    """[G, S, 6]: both choices' gates, and their experts (E where there is none) in two digits.

    A digit is below 256, and so exact in 16 bits.
    """
    choices = (gates.first, gates.second)
    experts_GSC = tf.stack(
        [tf.where(choice.kept_GS > 0, choice.expert_GS, num_experts) for choice in choices], -1
    )
    gates_GSC = tf.stack([choice.gate_GS for choice in choices], -1)
    digits = [tf.cast(digit, dtype) for digit in (experts_GSC // 256, experts_GSC % 256)]
    return tf.concat([tf.cast(gates_GSC, dtype), *digits], -1)


def _told(told_GSN: tf.Tensor, annotator: Annotator) -> tf.Tensor:
    """Tokens and their numbers by part, [W, Q, R, N]: each partition of W has its part whole."""
    ways, parts = annotator.factor("EG")
    told_QRN = tf.reshape(told_GSN, [parts, -1, told_GSN.shape[-1]])
    if parts == 1:
        told_QRN = annotator.annotate(told_QRN, "___")
    return annotator.annotate(tf.broadcast_to(told_QRN, [ways, *told_QRN.shape]), "EG__")


def _choices(numbers_WQRC: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Each slot's expert, int32 [W, Q, J], and its gate, [W, Q, J], of _numbers."""
    ways, parts = numbers_WQRC.shape[:2]
    gate_WQJ, high_WQJ, low_WQJ = (
        tf.reshape(x, [ways, parts, -1]) for x in tf.split(numbers_WQRC, 3, -1)
    )
    return tf.cast(high_WQJ, tf.int32) * 256 + tf.cast(low_WQJ, tf.int32), gate_WQJ


def _said(
    x_WQRM: tf.Tensor,
    expert_WQJ: tf.Tensor,
    wi_EMH: tf.Tensor,
    wo_EHM: tf.Tensor,
    annotator: Annotator,
) -> tf.Tensor:
    """[W, Q, J, M]: what its expert says of each slot's token; 0 where that is elsewhere."""
    ways, parts, num_slots = expert_WQJ.shape
    num_experts = wi_EMH.shape[0]
    size, num_own = tile_size(num_slots, num_experts), num_experts // ways
    slots_WQJ = tf.broadcast_to(tf.range(num_slots), expert_WQJ.shape)
    by_expert = xla.key_value_sort(expert_WQJ, slots_WQJ)
    place_WQJ = xla.key_value_sort(by_expert.sorted_values, slots_WQJ).sorted_values

    def longer(x_WQJ: tf.Tensor, value: int) -> tf.Tensor:
        """[W, Q, P]: with `value` after the last slot."""
        return tf.concat([x_WQJ, tf.fill([ways, parts, size], value)], -1)

    first_W11 = num_own * tf.range(ways)[:, None, None]
    bounds_WQ2 = tf.stack([_count(expert_WQJ < first_W11 + n) for n in (0, num_own)], -1)
    rows_WQPM = tf.zeros([ways, parts, num_slots + size, x_WQRM.shape[-1]], x_WQRM.dtype)
    arguments = [
        (bounds_WQ2, "EG_"),
        (longer(by_expert.sorted_keys, num_experts), "EG_"),
        (longer(by_expert.sorted_values // 2, 0), "EG_"),
        (place_WQJ, "EG_"),
        (x_WQRM, "EG__"),
        (rows_WQPM, "EG__"),
        (wi_EMH, "EMH"),
        (wo_EHM, "EHM"),
    ]
    said_WQJM = annotator.locally(functools.partial(_said_here, size), arguments, "EG__")
    own_WQJ = expert_WQJ // num_own == tf.range(ways)[:, None, None]
    return tf.where(own_WQJ[..., None], said_WQJM, tf.zeros([], said_WQJM.dtype))


def _said_here(
    size: int,
    bounds_112: tf.Tensor,
    expert_11P: tf.Tensor,
    token_11P: tf.Tensor,
    place_11J: tf.Tensor,
    x_11RM: tf.Tensor,
    rows_11PM: tf.Tensor,
    wi_XMH: tf.Tensor,
    wo_XHM: tf.Tensor,
) -> tf.Tensor:
    """One partition's part of _said, without regard to where it has nothing to say.

    Args:
      size: T.
      bounds_112: the first of its own slots as they are sorted, and the end of them.
      expert_11P: each sorted slot's expert.
      token_11P: each sorted slot's token.
      place_11J: where each slot is sorted to.
      x_11RM: the tokens.
      rows_11PM: zeros.
      wi_XMH: its experts' first weights.
      wo_XHM: their second ones.
    """
    begin, end = tf.unstack(tf.reshape(bounds_112, [2]))
    expert_P, token_P = tf.reshape(expert_11P, [-1]), tf.reshape(token_11P, [-1])
    x_RM, rows_PM = (tf.reshape(x, x.shape[2:]) for x in (x_11RM, rows_11PM))

    def of_expert(begin: tf.Tensor, rows_PM: tf.Tensor) -> list[tf.Tensor]:
        expert = _slice(expert_P, begin, 1)
        after = _count(expert_P <= expert)
        own = tf.reshape(expert % wi_XMH.shape[0], [])
        wi_MH, wo_HM = (tf.cast(_slice(w, own, 1)[0], x_RM.dtype) for w in (wi_XMH, wo_XHM))

        def of_tile(start: tf.Tensor, rows_PM: tf.Tensor) -> list[tf.Tensor]:
            """What it computes beyond the expert's last slot, the next expert's overwrite."""
            x_TM = tf.gather(x_RM, _slice(token_P, start, size))
            said_TM = tf.matmul(tf.nn.relu(tf.matmul(x_TM, wi_MH)), wo_HM)
            return [start + size, write_at(rows_PM, said_TM, start, axis=0)]

        _, rows_PM = tf.while_loop(lambda start, _: start < after, of_tile, [begin, rows_PM])
        return [after, rows_PM]

    _, rows_PM = tf.while_loop(lambda start, _: start < end, of_expert, [begin, rows_PM])
    rows_JM = tf.gather(rows_PM, tf.reshape(place_11J, [-1]))
    return tf.reshape(rows_JM, [1, 1, *rows_JM.shape])


def _slice(x: tf.Tensor, start: tf.Tensor, size: int) -> tf.Tensor:
    """x[start : start + size]."""
    starts = tf.stack([start] + [0] * (len(x.shape) - 1))
    return xla.dynamic_slice(x, starts, [size, *x.shape[1:]])


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(x, tf.int32), -1)
