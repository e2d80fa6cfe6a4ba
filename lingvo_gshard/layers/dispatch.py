"""Moves tokens to the buffers of their experts and back, in either of two equivalent ways.

G groups, S tokens of a group, E experts, C capacity, M model. Two flat dims of a group:
P = E * C buffer positions, and J = 2 * S assignments of a token to an expert, those of all first
choices before those of all second ones.
"""

from __future__ import annotations

import enum
import functools

from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.gating import Choice, Gating
from lingvo_gshard.layers.products import Arithmetic
from lingvo_gshard.sharding.annotator import Annotator


class Dispatch(enum.Enum):
    """How tokens reach their experts."""

    EINSUM = "einsum"  # Products with one-hot masks: Algorithm 2.
    GATHER = "gather"  # Indices and a manually partitioned Gather: section 3.2.


def combine_weights(gates: Gating, capacity: int) -> tf.Tensor:
    """[G, S, E, C]: the gate where token S is at position C in the buffer of expert E, else 0."""

    def part(choice: Choice) -> tf.Tensor:  # lines 9 and 20 of Algorithm 1
        weight_GSE = choice.mask_GSE * (choice.gate_GS * choice.kept_GS)[..., None]
        position_GSC = tf.one_hot(choice.position_GS, capacity)
        return weight_GSE[..., None] * position_GSC[:, :, None, :]

    return part(gates.first) + part(gates.second)


class OneHotDispatcher:
    """Dispatch.EINSUM, for one batch's gating. A token whose gate is 0 is not dispatched."""

    def __init__(
        self, gates: Gating, capacity: int, annotator: Annotator, arithmetic: Arithmetic
    ) -> None:
        self._combine_GSEC = annotator.annotate(combine_weights(gates, capacity), "GSEC")
        self._arithmetic = arithmetic

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """[E, G, C, M]: the tokens in expert buffers. Unused positions hold arbitrary values."""
        mask_GSEC = tf.cast(self._combine_GSEC > 0.0, x_GSM.dtype)
        return self._arithmetic.dispatch(mask_GSEC, x_GSM)

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """[G, S, M]: each token's expert outputs, summed with its gates as weights."""
        weights_GSEC = tf.cast(self._combine_GSEC, y_GECM.dtype)
        return self._arithmetic.combine(weights_GSEC, y_GECM)


class IndexedDispatcher:
    """Dispatch.GATHER, for one batch's gating; each partition moves the rows of its own groups.

    A buffer position holds at most one assignment, and an assignment has at most one position. So
    the gradient of either gather is a gather by the inverse index, and needs no scatter.
    """

    def __init__(self, gates: Gating, capacity: int, annotator: Annotator) -> None:
        self._annotator, num_experts = annotator, gates.first.mask_GSE.shape[-1]
        self._buffer_shape = [num_experts, capacity]
        choices = (gates.first, gates.second)
        self._kept_GJ = tf.concat([choice.kept_GS for choice in choices], 1)
        self._gate_GJ = tf.concat([choice.gate_GS for choice in choices], 1)
        position_GJ = tf.concat(
            [choice.expert_GS * capacity + choice.position_GS for choice in choices], 1
        )
        self._position_GJ = position_GJ * tf.cast(self._kept_GJ, tf.int32)
        assigned_GP = self._assigned(num_experts * capacity)
        self._assignment_GP = tf.maximum(assigned_GP - 1, 0)
        self._occupied_GP = tf.cast(assigned_GP > 0, tf.float32)

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """As OneHotDispatcher.dispatch."""

        def gradient(d_GPM: tf.Tensor) -> tf.Tensor:
            return _sum_choices(self._rows(d_GPM, self._position_GJ, self._kept_GJ))

        with tf.name_scope("dispatch"):
            token_GP = self._assignment_GP % x_GSM.shape[1]
            x_GPM = tf.custom_gradient(lambda x: (self._rows(x, token_GP), gradient))(x_GSM)
            num_groups, _, dim = x_GPM.shape
            x_GECM = tf.reshape(x_GPM, [num_groups, *self._buffer_shape, dim])
            return tf.transpose(x_GECM, [1, 0, 2, 3])

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """As OneHotDispatcher.combine."""

        def gradient(d_GJM: tf.Tensor) -> tf.Tensor:
            return self._rows(d_GJM, self._assignment_GP, self._occupied_GP)

        with tf.name_scope("combine"):
            num_groups, *_, dim = y_GECM.shape
            y_GPM = tf.reshape(y_GECM, [num_groups, -1, dim])
            rows = tf.custom_gradient(lambda y: (self._rows(y, self._position_GJ), gradient))
            y_GJM = rows(y_GPM)
            weight_GJ = tf.cast(self._gate_GJ * self._kept_GJ, y_GJM.dtype)
            return _sum_choices(y_GJM * weight_GJ[..., None])

    def _assigned(self, num_positions: int) -> tf.Tensor:
        """int32 [G, P]: 1 + the assignment at each buffer position, 0 where there is none."""

        def local(position_GJ: tf.Tensor, kept_GJ: tf.Tensor) -> tf.Tensor:
            num_groups, num_assignments = position_GJ.shape
            group_GJ = tf.repeat(tf.range(num_groups)[:, None], num_assignments, 1)
            assignment_GJ = tf.tile(tf.range(1, num_assignments + 1)[None], [num_groups, 1])
            # Dropped assignments have position 0 and add 0 there.
            return tf.scatter_nd(
                tf.stack([group_GJ, position_GJ], -1),
                assignment_GJ * kept_GJ,
                [num_groups, num_positions],
            )

        kept_GJ = tf.cast(self._kept_GJ, tf.int32)
        return self._annotator.locally(local, [(self._position_GJ, "G_"), (kept_GJ, "G_")], "G_")

    def _rows(
        self, x_GAM: tf.Tensor, index_GQ: tf.Tensor, weight_GQ: tf.Tensor | None = None
    ) -> tf.Tensor:
        """[G, Q, M]: the rows of x_GAM at these indices, within each group, times the weights."""
        local = functools.partial(tf.gather, batch_dims=1)
        rows_GQM = self._annotator.locally(local, [(x_GAM, "G_M"), (index_GQ, "G_")], "G_M")
        if weight_GQ is None:
            return rows_GQM
        return rows_GQM * tf.cast(weight_GQ, rows_GQM.dtype)[..., None]


def _sum_choices(x_GJM: tf.Tensor) -> tf.Tensor:
    """[G, S, M]: the sum of the tokens' first and second choices."""
    num_groups, num_assignments, dim = x_GJM.shape
    return tf.reduce_sum(tf.reshape(x_GJM, [num_groups, 2, num_assignments // 2, dim]), 1)
