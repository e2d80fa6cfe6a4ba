"""Tokens in the buffers of their experts, by one-hot masks or, equivalently, by indices.

G groups, S tokens of a group, E experts, C capacity, M model: the letters of sharding/layout.py.
Two more are local. F = E * C are the positions of all buffers of a group. J = k * S are its
assignments of a token to one of its k experts: first all first choices, then all second ones, and
so on.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable

from lingvo_gshard.core.late import tf
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.layers.routing import Choice, Gates
from lingvo_gshard.sharding.annotator import Annotator


class Dispatch(enum.Enum):
    """How tokens reach their experts."""

    EINSUM = "einsum"  # Products with one-hot masks: Algorithm 2.
    GATHER = "gather"  # Indices and a manually partitioned Gather: section 3.2.
    RAGGED = "ragged"  # Training drops no token: see ragged_experts.py. Otherwise as EINSUM.


def combine_weights(gates: Gates, capacity: int) -> tf.Tensor:
    """Returns [G, S, E, C]: the gate where token S is at position C of expert E's buffer, else 0.

    These are the G of Algorithm 1, lines 9 and 20, with a dim for the position.
    """

    def of_choice(choice: Choice) -> tf.Tensor:
        weight_GSE = choice.mask_GSE * (choice.gate_GS * choice.kept_GS)[..., None]
        position_GSC = tf.one_hot(choice.position_GS, capacity)
        return weight_GSE[..., None] * position_GSC[:, :, None, :]

    return functools.reduce(operator.add, map(of_choice, gates.choices))


class Indices:
    """Dispatch.GATHER, for one batch's gating; each partition moves the rows of its own groups.

    A buffer position holds at most one assignment, and an assignment has at most one position. So
    the gradient of either gather is a gather by the inverse index, not a scatter.
    """

    def __init__(
        self, gates: Gates, capacity: int, annotator: Annotator, numerics: Numerics
    ) -> None:
        choices = gates.choices
        num_experts = choices[0].mask_GSE.shape[-1]
        self._annotator = annotator
        self._numerics = numerics
        self._buffer_shape = [num_experts, capacity]
        self._k = gates.k

        self._kept_GJ = tf.concat([choice.kept_GS for choice in choices], 1)
        self._gate_GJ = tf.concat([choice.gate_GS for choice in choices], 1)

        # From an assignment to its buffer position; 0 if it was dropped.
        position_GJ = tf.concat(
            [choice.expert_GS * capacity + choice.position_GS for choice in choices], 1
        )
        self._position_GJ = position_GJ * tf.cast(self._kept_GJ, tf.int32)

        # The inverse, from a buffer position to its assignment; 0 if it is empty.
        assigned_GF = self._assigned(num_experts * capacity)
        self._assignment_GF = tf.maximum(assigned_GF - 1, 0)
        self._occupied_GF = tf.cast(assigned_GF > 0, tf.float32)

    def dispatched(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the tokens in expert buffers, [E, G, C, M]; unused positions are arbitrary."""

        def gradient(d_GFM: tf.Tensor) -> tf.Tensor:
            return self._sum_choices(self._gather(d_GFM, self._position_GJ, self._kept_GJ))

        @tf.custom_gradient
        def gather_tokens(x_GSM: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self._gather(x_GSM, token_GF), gradient

        # Assignments S to 2 * S - 1 are the second choices of the same tokens, and so on.
        token_GF = self._assignment_GF % x_GSM.shape[1]
        x_GFM = gather_tokens(x_GSM)

        num_groups, _, dim = x_GFM.shape
        x_GECM = tf.reshape(x_GFM, [num_groups, *self._buffer_shape, dim])
        x_EGCM = tf.transpose(x_GECM, [1, 0, 2, 3])
        return self._numerics.lookup("GSEC,GSM->EGCM", x_EGCM, S=x_GSM.shape[1])

    def combined(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """Returns each token's expert outputs, summed with its gates as weights: [G, S, M]."""

        def gradient(d_GJM: tf.Tensor) -> tf.Tensor:
            return self._gather(d_GJM, self._assignment_GF, self._occupied_GF)

        @tf.custom_gradient
        def gather_outputs(y_GFM: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self._gather(y_GFM, self._position_GJ), gradient

        num_groups, *_, dim = y_GECM.shape
        y_GFM = tf.reshape(y_GECM, [num_groups, -1, dim])
        y_GJM = gather_outputs(y_GFM)

        weight_GJ = tf.cast(self._gate_GJ * self._kept_GJ, y_GJM.dtype)
        y_GSM = self._sum_choices(y_GJM * weight_GJ[..., None])
        num_experts, capacity = self._buffer_shape
        return self._numerics.lookup("GSEC,GECM->GSM", y_GSM, E=num_experts, C=capacity)

    def _assigned(self, num_positions: int) -> tf.Tensor:
        """Returns 1 + the assignment at each buffer position, 0 where it is empty: int32 [G, F]."""

        def local(position_GJ: tf.Tensor, kept_GJ: tf.Tensor) -> tf.Tensor:
            # For each assignment: its group, and 1 + its index in the group.
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

    def _gather(self, x: tf.Tensor, index: tf.Tensor, weight: tf.Tensor | None = None) -> tf.Tensor:
        """Returns rows of x within each group, times their weights if any: [G, number, M].

        `x` is [G, rows, M]; `index` and `weight` are [G, number].
        """
        gather = functools.partial(tf.gather, batch_dims=1)
        rows = self._annotator.locally(gather, [(x, "G_M"), (index, "G_")], "G_M")
        if weight is None:
            return rows
        return rows * tf.cast(weight, rows.dtype)[..., None]

    def _sum_choices(self, x_GJM: tf.Tensor) -> tf.Tensor:
        """Returns the sums over each token's choices: [G, S, M]."""
        num_groups, num_assignments, dim = x_GJM.shape
        by_choice = tf.reshape(x_GJM, [num_groups, self._k, num_assignments // self._k, dim])
        # One by one: XLA's CPU compiler would write all of `by_choice` before it reduced it.
        return functools.reduce(operator.add, tf.unstack(by_choice, axis=1))
