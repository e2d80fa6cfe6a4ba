"""Experts without capacity: each computes the tokens that chose it, and no more. No gradients.

A slot is a token and one of its two choices. Slots are sorted by expert, and a loop takes them in
tiles of a fixed size, each of one expert. So nothing overflows, and an idle expert costs nothing,
nor does a token that takes none.

Partitions that share the experts get each other's tokens (one all-gather; two if experts are
copied), compute the slots of their own experts, and give each token what these say (an all-to-all).

G groups, S tokens of a group, M model, H hidden, E experts, T slots of a tile. W ways that experts
are split, Q ways that tokens are split besides; of such a part R tokens, J = 2 * R slots, and
P = J + T places, of which the last tile may overrun. Suffixes give dims: `start_WQ`.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from lingvo_gshard.core.base_layer import Annotator
from lingvo_gshard.layers.cache import write_at
from lingvo_gshard.layers.gating import Gating

_LEAST_TILE, _LARGEST_TILE = 16, 128


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
    ways, parts = annotator.factor("EG")

    def shared(tensor: tf.Tensor) -> tf.Tensor:
        """[Q, ...] as [W, Q, ...]: each partition of W has it whole."""
        copies = tf.broadcast_to(tensor, [ways, *tensor.shape])
        return annotator.annotate(copies, "EG" + "_" * (tensor.shape.rank - 1))

    numbers_GSC = _numbers(gates, num_experts, x_GSM.dtype)
    x_QRM, numbers_QRC = _told(x_GSM, numbers_GSC, parts, annotator)
    expert_QJ, gate_QJ = _choices(numbers_QRC)
    expert_QJ = annotator.annotate(expert_QJ, "__")
    size = tile_size(expert_QJ.shape[1], num_experts)
    tiles = _Tiles(
        num_experts // ways,
        size,
        _num_tiles(expert_QJ, num_experts, ways, size),
        shared(expert_QJ),
        annotator,
    )
    rows_WQJM = tiles.compute(shared(x_QRM), wi_EMH, wo_EHM)
    rows_WQJM *= shared(gate_QJ)[..., None]
    said_WGS2M = tf.reshape(rows_WQJM, [ways, *x_GSM.shape[:2], 2, dim])
    said_WGSM = annotator.annotate(tf.reduce_sum(said_WGS2M, 3), "_G__")
    return annotator.annotate(tf.reduce_sum(said_WGSM, 0), "GSM")


def tile_size(num_slots: int, num_experts: int) -> int:
    """T: half an expert's even share of J slots, but 16 to 128; never more than the tokens.

    An expert's last tile is half empty then, on the average: a fifth of what is computed.
    """
    half = num_slots // num_experts // 2
    return min(num_slots // 2, max(_LEAST_TILE, min(_LARGEST_TILE, half)))


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


def _told(
    x_GSM: tf.Tensor, numbers_GSC: tf.Tensor, parts: int, annotator: Annotator
) -> tuple[tf.Tensor, tf.Tensor]:
    """Tokens by part [Q, R, M], and everywhere, as all must know whose tiles are most, [Q, R, 6].

    Where all partitions share experts, both go everywhere, in one all-gather.
    """
    if parts > 1:
        numbers_QRC = tf.reshape(numbers_GSC, [parts, -1, numbers_GSC.shape[-1]])
        x_QRM = tf.reshape(x_GSM, [parts, -1, x_GSM.shape[-1]])
        return x_QRM, annotator.annotate(numbers_QRC, "___")
    told_GSN = tf.concat([x_GSM, numbers_GSC], -1)
    told_1RN = annotator.annotate(tf.reshape(told_GSN, [1, -1, told_GSN.shape[-1]]), "___")
    x_1RM, numbers_1RC = tf.split(told_1RN, [x_GSM.shape[-1], numbers_GSC.shape[-1]], -1)
    return x_1RM, numbers_1RC


def _choices(numbers_QRC: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Each slot's expert, int32 [Q, J], and its gate, [Q, J], of _numbers."""
    parts = numbers_QRC.shape[0]
    gate_QJ, high_QJ, low_QJ = (tf.reshape(x, [parts, -1]) for x in tf.split(numbers_QRC, 3, -1))
    return tf.cast(high_QJ, tf.int32) * 256 + tf.cast(low_QJ, tf.int32), gate_QJ


def _num_tiles(expert_QJ: tf.Tensor, num_experts: int, ways: int, size: int) -> tf.Tensor:
    """int32 scalar: the tiles of the partition that has most."""
    mine_QJE = expert_QJ[..., None] == tf.range(num_experts)
    count_QE = tf.reduce_sum(tf.cast(mine_QJE, tf.int32), 1)
    tiles_QE = (count_QE + size - 1) // size
    return tf.reduce_max(tf.reduce_sum(tf.reshape(tiles_QE, [-1, ways, num_experts // ways]), -1))


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Each partition's way through the slots of its experts, from the first to the last.

    A tile ends with its expert, or after T slots. Its T rows are computed whole: those beyond its
    end are the next tile's to overwrite, or of no slot of this partition.

    Attributes:
      num_own: experts of one partition.
      size: T.
      number: int32 scalar, the tiles.
      expert_WQJ: int32, the expert of each slot, E where it has none.
      annotator: the experiment's.
    """

    num_own: int
    size: int
    number: tf.Tensor
    expert_WQJ: tf.Tensor
    annotator: Annotator

    def compute(self, x_WQRM: tf.Tensor, wi_EMH: tf.Tensor, wo_EHM: tf.Tensor) -> tf.Tensor:
        """[W, Q, J, M]: what its expert says of each slot's token; 0 where that is elsewhere."""
        ways, _, num_slots = self.expert_WQJ.shape
        slots_WQJ = tf.broadcast_to(tf.range(num_slots), self.expert_WQJ.shape)
        by_expert = xla.key_value_sort(self.expert_WQJ, slots_WQJ)
        rows_WQPM = self._computed(
            self._longer(by_expert.sorted_keys, ways * self.num_own),
            self._longer(by_expert.sorted_values // 2, 0),
            x_WQRM,
            [(wi_EMH, "EMH"), (wo_EHM, "EHM")],
        )
        place_WQJ = xla.key_value_sort(by_expert.sorted_values, slots_WQJ).sorted_values
        rows_WQJM = self.annotator.locally(
            _rows_at, [(rows_WQPM, "EG__"), (place_WQJ, "EG_")], "EG__"
        )
        own_WQJ = self.expert_WQJ // self.num_own == tf.range(ways)[:, None, None]
        return tf.where(own_WQJ[..., None], rows_WQJM, tf.zeros([], x_WQRM.dtype))

    def _computed(
        self,
        expert_WQP: tf.Tensor,
        token_WQP: tf.Tensor,
        x_WQRM: tf.Tensor,
        weights: list[tuple[tf.Tensor, str]],
    ) -> tf.Tensor:
        """[W, Q, P, M]: the rows of the slots as they are sorted, tile by tile."""
        ways, parts, num_places = expert_WQP.shape

        def condition(index: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return index < self.number

        def body(index: tf.Tensor, start_WQ: tf.Tensor, rows_WQPM: tf.Tensor) -> list[tf.Tensor]:
            # A sum in place of a gather: it stays on its partition.
            here_WQP = tf.range(num_places) == start_WQ[..., None]
            expert_WQ = tf.reduce_sum(tf.where(here_WQP, expert_WQP, 0), -1)
            end_WQ = _count(expert_WQP <= expert_WQ[..., None])
            tile = [
                (rows_WQPM, "EG__"),
                (start_WQ, "EG"),
                (token_WQP, "EG_"),
                (x_WQRM, "EG__"),
                (expert_WQ % self.num_own, "EG"),
            ]
            rows_WQPM = self.annotator.locally(self._with_tile, [*tile, *weights], "EG__")
            start_WQ = tf.minimum(start_WQ + self.size, end_WQ)
            return [index + 1, self.annotator.annotate(start_WQ, "EG"), rows_WQPM]

        start_WQ = _count(expert_WQP < self.num_own * tf.range(ways)[:, None, None])
        rows_WQPM = tf.zeros([ways, parts, num_places, x_WQRM.shape[-1]], x_WQRM.dtype)
        start = [
            tf.constant(0),
            self.annotator.annotate(start_WQ, "EG"),
            self.annotator.annotate(rows_WQPM, "EG__"),
        ]
        return tf.while_loop(condition, body, start)[-1]

    def _with_tile(
        self,
        rows_11PM: tf.Tensor,
        start_11: tf.Tensor,
        token_11P: tf.Tensor,
        x_11RM: tf.Tensor,
        expert_11: tf.Tensor,
        wi_XMH: tf.Tensor,
        wo_XHM: tf.Tensor,
    ) -> tf.Tensor:
        """One partition's rows with those of the tile that starts at `start`."""
        start, expert = tf.reshape(start_11, [1]), tf.reshape(expert_11, [1])
        token_T = xla.dynamic_slice(tf.reshape(token_11P, [-1]), start, [self.size])
        x_TM = tf.gather(tf.reshape(x_11RM, x_11RM.shape[2:]), token_T)
        hidden_TH = tf.nn.relu(tf.matmul(x_TM, _item(wi_XMH, expert, x_TM.dtype)))
        said_TM = tf.matmul(hidden_TH, _item(wo_XHM, expert, x_TM.dtype))
        said_11TM = tf.reshape(said_TM, [1, 1, *said_TM.shape])
        return write_at(rows_11PM, said_11TM, tf.reshape(start, []), axis=2)

    def _longer(self, x_WQJ: tf.Tensor, value: int) -> tf.Tensor:
        """[W, Q, P]: with `value` after the last slot."""
        ends = tf.fill([*x_WQJ.shape[:2], self.size], value)
        return self.annotator.annotate(tf.concat([x_WQJ, ends], -1), "EG_")


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(x, tf.int32), -1)


def _item(weight_XIO: tf.Tensor, index: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """One expert's weight [I, O]; `index` is int32 [1]."""
    start = tf.concat([index, [0, 0]], 0)
    one = xla.dynamic_slice(weight_XIO, start, [1, *weight_XIO.shape[1:]])
    return tf.cast(tf.reshape(one, weight_XIO.shape[1:]), dtype)


def _rows_at(rows_11PM: tf.Tensor, place_11J: tf.Tensor) -> tf.Tensor:
    rows_JM = tf.gather(tf.reshape(rows_11PM, rows_11PM.shape[2:]), tf.reshape(place_11J, [-1]))
    return tf.reshape(rows_JM, [1, 1, *rows_JM.shape])
