"""Tokens to the places of their experts and back: two ways with one result.

G groups, S tokens of a group, E experts, C capacity, M model. P = E * C places of a group and
J = 2 * S slots, the tokens' first choices and then their second ones, are flat dims of a group.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from lingvo_gshard.core.base_layer import Annotator
from lingvo_gshard.layers.gating import Choice, Gating


class Dispatch(enum.Enum):
    """How tokens reach their experts."""

    EINSUM = "einsum"  # By products with one-hot masks: Algorithm 2.
    GATHER = "gather"  # By indices, with a Gather that is partitioned manually: section 3.2.


class Dispatcher(Protocol):
    """Both ways: what they need to know of one batch's gating they hold."""

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """[E, G, C, M]: the tokens at their experts' places. An empty place may hold anything."""

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """[G, S, M]: of each token, what its experts say, weighted by their gates."""


def make_dispatcher(
    way: Dispatch, gates: Gating, num_experts: int, capacity: int, annotator: Annotator
) -> Dispatcher:
    """The Dispatcher of one batch's gating with E experts of C places."""
    if way is Dispatch.EINSUM:
        return _OneHot(gates, capacity, annotator)
    return _Indexed(gates, num_experts, capacity, annotator)


def combine_weights(gates: Gating, capacity: int) -> tf.Tensor:
    """[G, S, E, C]: the gate where token S of group G sits at place C of expert E, else 0."""

    def part(choice: Choice) -> tf.Tensor:  # lines 9 and 20
        weight_GSE = choice.mask_GSE * (choice.gate_GS * choice.kept_GS)[..., None]
        place_GSC = tf.one_hot(choice.position_GS, capacity)
        return weight_GSE[..., None] * place_GSC[:, :, None, :]

    return part(gates.first) + part(gates.second)


class _OneHot:
    """Algorithm 2's einsums; a token whose gate is 0 is not dispatched."""

    def __init__(self, gates: Gating, capacity: int, annotator: Annotator) -> None:
        self._combine_GSEC = annotator.annotate(combine_weights(gates, capacity), "GSEC")

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        mask_GSEC = tf.cast(self._combine_GSEC > 0.0, x_GSM.dtype)
        return tf.einsum("GSEC,GSM->EGCM", mask_GSEC, x_GSM, name="dispatch")

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        weights_GSEC = tf.cast(self._combine_GSEC, y_GECM.dtype)
        return tf.einsum("GSEC,GECM->GSM", weights_GSEC, y_GECM, name="combine")


class _Indexed:
    """Rows moved by their indices, each partition within its own groups.

    A place holds at most one slot and a slot has at most one place. So the gradient of a move is
    a move as well, by the other index: no gradient is a scatter.
    """

    def __init__(
        self, gates: Gating, num_experts: int, capacity: int, annotator: Annotator
    ) -> None:
        self._annotator = annotator
        self._experts_and_places = [num_experts, capacity]
        choices = (gates.first, gates.second)
        self._kept_GJ = tf.concat([choice.kept_GS for choice in choices], 1)
        self._gate_GJ = tf.concat([choice.gate_GS for choice in choices], 1)
        place_GJ = tf.concat(
            [choice.expert_GS * capacity + choice.position_GS for choice in choices], 1
        )
        self._place_GJ = place_GJ * tf.cast(self._kept_GJ, tf.int32)
        held_GP = self._held(num_experts * capacity)
        self._slot_GP = tf.maximum(held_GP - 1, 0)
        self._occupied_GP = tf.cast(held_GP > 0, tf.float32)

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def move(x_GSM: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(d_GPM: tf.Tensor) -> tf.Tensor:
                return _both_choices(self._rows(d_GPM, self._place_GJ, self._kept_GJ))

            token_GP = self._slot_GP % x_GSM.shape[1]
            return self._rows(x_GSM, token_GP), gradient

        with tf.name_scope("dispatch"):
            x_GPM = move(x_GSM)
            num_groups, _, dim = x_GPM.shape
            x_GECM = tf.reshape(x_GPM, [num_groups, *self._experts_and_places, dim])
            return tf.transpose(x_GECM, [1, 0, 2, 3])

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def move(y_GPM: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(d_GJM: tf.Tensor) -> tf.Tensor:
                return self._rows(d_GJM, self._slot_GP, self._occupied_GP)

            return self._rows(y_GPM, self._place_GJ), gradient

        with tf.name_scope("combine"):
            num_groups, *_, dim = y_GECM.shape
            y_GJM = move(tf.reshape(y_GECM, [num_groups, -1, dim]))
            weight_GJ = tf.cast(self._gate_GJ * self._kept_GJ, y_GJM.dtype)
            return _both_choices(y_GJM * weight_GJ[..., None])

    def _held(self, num_places: int) -> tf.Tensor:
        """int32 [G, P]: 1 + the slot that holds each place, 0 where it is empty."""

        def local(place_GJ: tf.Tensor, kept_GJ: tf.Tensor) -> tf.Tensor:
            num_groups, num_slots = place_GJ.shape
            group_GJ = tf.repeat(tf.range(num_groups)[:, None], num_slots, 1)
            slot_GJ = tf.tile(tf.range(1, num_slots + 1)[None], [num_groups, 1])
            # Slots without a place add 0 to the first one.
            return tf.scatter_nd(
                tf.stack([group_GJ, place_GJ], -1), slot_GJ * kept_GJ, [num_groups, num_places]
            )

        kept_GJ = tf.cast(self._kept_GJ, tf.int32)
        return self._annotator.locally(local, [(self._place_GJ, "G_"), (kept_GJ, "G_")], "G_")

    def _rows(
        self, x_GAM: tf.Tensor, index_GQ: tf.Tensor, weight_GQ: tf.Tensor | None = None
    ) -> tf.Tensor:
        """[G, Q, M]: of each group, the rows at these indices, weighted."""

        def local(x_GAM: tf.Tensor, index_GQ: tf.Tensor) -> tf.Tensor:
            return tf.gather(x_GAM, index_GQ, batch_dims=1)

        rows_GQM = self._annotator.locally(local, [(x_GAM, "G_M"), (index_GQ, "G_")], "G_M")
        if weight_GQ is None:
            return rows_GQM
        return rows_GQM * tf.cast(weight_GQ, rows_GQM.dtype)[..., None]


def _both_choices(x_GJM: tf.Tensor) -> tf.Tensor:
    """[G, S, M]: first choices plus second ones."""
    num_groups, num_slots, dim = x_GJM.shape
    return tf.reduce_sum(tf.reshape(x_GJM, [num_groups, 2, num_slots // 2, dim]), 1)
