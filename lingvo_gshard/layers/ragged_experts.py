"""Experts without a capacity: each computes exactly the tokens that chose it. No gradients.

An assignment is a token with one of its two choices. Assignments are sorted by expert, and each
partition computes those of its own experts, one expert after the other, in tiles of a fixed size.
So nothing overflows, and idle experts and padding cost nothing.

Partitions that share the experts gather each other's tokens (an all-gather), compute the
assignments of their own experts, and send each token its experts' outputs (an all-to-all).

G groups, S tokens of a group, M model, H hidden, E experts, X experts of one partition. W is the
number of partitions of the experts; Q is that of parts that tokens have besides. Such a part has R
tokens and J = 2 * R assignments. T is the size of a tile, and P = J + T the rows of outputs, since
the last tile may run over the end. A name's suffix gives its dims: `start_WQ`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from lingvo_gshard.core.late import tf, xla
from lingvo_gshard.layers.gating import Gating
from lingvo_gshard.layers.products import Arithmetic
from lingvo_gshard.layers.slices import read_at, write_at
from lingvo_gshard.sharding.annotator import Annotator

# The rounds that a batch is expected to need: the tokens of the fullest buffer over C.
_LIKELY_ROUNDS = 8


def moves_less(num_tokens: int, buffer_rows: int, annotator: Annotator) -> bool:
    """Whether ragged experts move fewer rows of a partition than dispatch in rounds does.

    A partition gathers the tokens of all W partitions of the experts and sends back an output for
    each. A round sends a partition's share of all buffers, E * G * C rows, to the experts and back.
    So rounds win on many partitions, and gathering wins on few.
    """
    (_, parts), (ways,) = annotator.factor("EG"), annotator.factor("G")
    return num_tokens / parts <= _LIKELY_ROUNDS * buffer_rows / ways


def ragged_experts(
    x_GSM: tf.Tensor,
    gates: Gating,
    wi_EMH: tf.Tensor,
    wo_EHM: tf.Tensor,
    annotator: Annotator,
    arithmetic: Arithmetic,
) -> tf.Tensor:
    """Sums the outputs of each token's kept choices, weighted by its gates: [G, S, M]."""
    num_experts, dim = wi_EMH.shape[:2]
    ways, _ = annotator.factor("EG")
    choices_GSC = _encode_choices(gates, num_experts, x_GSM.dtype)
    gathered_WQRN = _gather_tokens(tf.concat([x_GSM, choices_GSC], -1), annotator)
    x_WQRM, choices_WQRC = tf.split(gathered_WQRN, [dim, choices_GSC.shape[-1]], -1)
    expert_WQJ, gate_WQJ = _decode_choices(choices_WQRC)
    outputs_WQJM = _expert_outputs(x_WQRM, expert_WQJ, wi_EMH, wo_EHM, annotator, arithmetic)
    weighted_WQJM = outputs_WQJM * gate_WQJ[..., None]
    outputs_WGS2M = tf.reshape(weighted_WQJM, [ways, *x_GSM.shape[:2], 2, dim])
    outputs_WGSM = annotator.annotate(tf.reduce_sum(outputs_WGS2M, 3), "_G__")
    return annotator.annotate(tf.reduce_sum(outputs_WGSM, 0), "GSM")


def tile_size(num_assignments: int, num_experts: int) -> int:
    """T: a quarter of an expert's even share of J assignments, within 8 to 128 and the tokens.

    An expert's last tile is half empty on average, which is a ninth of all computed rows.
    """
    quarter = num_assignments // num_experts // 4
    return min(num_assignments // 2, max(8, min(128, quarter)))


def _encode_choices(gates: Gating, num_experts: int, dtype: tf.DType) -> tf.Tensor:
    """[G, S, 6]: both choices' gates, and experts as two digits, exact in bfloat16; E is none."""
    choices = (gates.first, gates.second)
    experts_GSC = tf.stack(
        [tf.where(choice.kept_GS > 0, choice.expert_GS, num_experts) for choice in choices], -1
    )
    gates_GSC = tf.stack([choice.gate_GS for choice in choices], -1)
    digits = [tf.cast(digit, dtype) for digit in (experts_GSC // 256, experts_GSC % 256)]
    return tf.concat([tf.cast(gates_GSC, dtype), *digits], -1)


def _gather_tokens(x_GSN: tf.Tensor, annotator: Annotator) -> tf.Tensor:
    """Gathers the tokens of each part, with their choices: [W, Q, R, N], equal along W."""
    ways, parts = annotator.factor("EG")
    x_QRN = tf.reshape(x_GSN, [parts, -1, x_GSN.shape[-1]])
    if parts == 1:
        x_QRN = annotator.annotate(x_QRN, "___")
    return annotator.annotate(tf.broadcast_to(x_QRN, [ways, *x_QRN.shape]), "EG__")


def _decode_choices(choices_WQRC: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Each assignment's expert, int32 [W, Q, J], and its gate, [W, Q, J], from _encode_choices."""
    ways, parts = choices_WQRC.shape[:2]
    gate_WQJ, high_WQJ, low_WQJ = (
        tf.reshape(x, [ways, parts, -1]) for x in tf.split(choices_WQRC, 3, -1)
    )
    return tf.cast(high_WQJ, tf.int32) * 256 + tf.cast(low_WQJ, tf.int32), gate_WQJ


def _expert_outputs(
    x_WQRM: tf.Tensor,
    expert_WQJ: tf.Tensor,
    wi_EMH: tf.Tensor,
    wo_EHM: tf.Tensor,
    annotator: Annotator,
    arithmetic: Arithmetic,
) -> tf.Tensor:
    """[W, Q, J, M]: the outputs of partition W's experts; 0 for assignments to other experts."""
    (ways, parts, num_assignments), num_experts = expert_WQJ.shape, wi_EMH.shape[0]
    size, num_own = tile_size(num_assignments, num_experts), num_experts // ways
    index_WQJ = tf.broadcast_to(tf.range(num_assignments), expert_WQJ.shape)
    by_expert = xla.key_value_sort(expert_WQJ, index_WQJ)
    position_WQJ = xla.key_value_sort(by_expert.sorted_values, index_WQJ).sorted_values

    def padded(x_WQJ: tf.Tensor, value: int) -> tf.Tensor:
        """[W, Q, P]: `value` follows the last assignment."""
        return tf.concat([x_WQJ, tf.fill([ways, parts, size], value)], -1)

    first_W11 = num_own * tf.range(ways)[:, None, None]
    bounds_WQ2 = tf.stack([_count(expert_WQJ < first_W11 + n) for n in (0, num_own)], -1)
    rows_WQPM = tf.zeros([ways, parts, num_assignments + size, x_WQRM.shape[-1]], x_WQRM.dtype)
    arguments = [
        (bounds_WQ2, "EG_"),
        (padded(by_expert.sorted_keys, num_experts), "EG_"),
        (padded(by_expert.sorted_values // 2, 0), "EG_"),
        (position_WQJ, "EG_"),
        (x_WQRM, "EG__"),
        (rows_WQPM, "EG__"),
        # Whole: a product over a dim that is split here would be left without its sum.
        (wi_EMH, "E__"),
        (wo_EHM, "E__"),
    ]
    local = functools.partial(_local_outputs, size, arithmetic.matmul_weight)
    outputs_WQJM = annotator.locally(local, arguments, "EG__")
    own_WQJ = expert_WQJ // num_own == tf.range(ways)[:, None, None]
    return tf.where(own_WQJ[..., None], outputs_WQJM, tf.zeros([], outputs_WQJM.dtype))


def _local_outputs(
    size: int,
    matmul: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    bounds_112: tf.Tensor,
    expert_11P: tf.Tensor,
    token_11P: tf.Tensor,
    position_11J: tf.Tensor,
    x_11RM: tf.Tensor,
    rows_11PM: tf.Tensor,
    wi_XMH: tf.Tensor,
    wo_XHM: tf.Tensor,
) -> tf.Tensor:
    """One partition's _expert_outputs; arbitrary for assignments to other partitions' experts.

    `size` is T. The bounds are those of this partition's assignments in the order of `expert_11P`
    and `token_11P`. `position_11J` is each assignment's position there. The rows are zeros.
    """
    begin, end = tf.unstack(tf.reshape(bounds_112, [2]))
    expert_P, token_P = tf.reshape(expert_11P, [-1]), tf.reshape(token_11P, [-1])
    x_RM, rows_PM = (tf.reshape(x, x.shape[2:]) for x in (x_11RM, rows_11PM))

    def next_expert(begin: tf.Tensor, rows_PM: tf.Tensor) -> list[tf.Tensor]:
        expert = read_at(expert_P, begin, 1)
        after = _count(expert_P <= expert)
        own = tf.reshape(expert % wi_XMH.shape[0], [])
        wi_MH, wo_HM = (read_at(w, own, 1)[0] for w in (wi_XMH, wo_XHM))

        def next_tile(start: tf.Tensor, rows_PM: tf.Tensor) -> list[tf.Tensor]:
            """A tile may run into the next expert's rows, which that expert then overwrites."""
            x_TM = tf.gather(x_RM, read_at(token_P, start, size))
            outputs_TM = matmul(tf.nn.relu(matmul(x_TM, wi_MH)), wo_HM)
            return [start + size, write_at(rows_PM, outputs_TM, start, axis=0)]

        _, rows_PM = tf.while_loop(lambda start, _: start < after, next_tile, [begin, rows_PM])
        return [after, rows_PM]

    _, rows_PM = tf.while_loop(lambda start, _: start < end, next_expert, [begin, rows_PM])
    rows_JM = tf.gather(rows_PM, tf.reshape(position_11J, [-1]))
    return tf.reshape(rows_JM, [1, 1, *rows_JM.shape])


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(x, tf.int32), -1)
