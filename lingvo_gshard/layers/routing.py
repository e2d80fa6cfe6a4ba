"""The result of a gating: every token's choices of experts, and how evenly they use the experts.

G groups, S tokens of a group, E experts, C capacity of an expert in a group. A name's suffix gives
its dims: `gates_GSE`. All floats are float32; masks are floats, 0 or 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap

# A divisor for experts without tokens: microbatches that dispatch one send more on average.
_FEWEST_SENT = 1e-6


@dataclasses.dataclass(frozen=True)
class Choice:
    """The first choice of every token, or the second, and so on."""

    mask_GSE: tf.Tensor  # 1 at the chosen expert; all 0 for padding.
    expert_GS: tf.Tensor  # int32, the index of the chosen expert; arbitrary for padding.
    gate_GS: tf.Tensor  # The weight of the expert's output.
    position_GS: tf.Tensor  # int32, the position in the expert's buffer; C or more if it is full.
    wanted_GS: tf.Tensor  # 1 where the token asks for the expert.
    kept_GS: tf.Tensor  # 1 where the expert also has room, so that the token is dispatched.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How one layer routed its tokens, not counting padding. All but sent_E are scalars.

    All fields are linear in the tokens, so that their means over microbatches are the whole batch's
    fields: see Context.tokens_of_mean. `statistics` computes loads from them, which are not linear.

    A field is None where the layer's gating does not have it.
    """

    aux_loss: tf.Tensor  # l_aux of line 13, averaged over the groups.
    sent_E: tf.Tensor  # The number of tokens dispatched to each expert.
    overflow: tf.Tensor  # The share of tokens that no expert took.
    overflow_first: tf.Tensor | None = None  # The share whose first expert was full.
    # The share that asked for their second expert and found it full.
    overflow_second: tf.Tensor | None = None
    second_dispatched: tf.Tensor | None = None  # The share that their second expert took.
    entropy: tf.Tensor  # The entropy of a token's gates in nats, averaged over the tokens.
    dropped_choices: tf.Tensor | None = None  # The share of all choices that found a full expert.
    router_loss: tf.Tensor | None = None  # What the layer itself adds to the loss.

    @property
    def balance_loss(self) -> tf.Tensor:
        """Returns E^2 * l_aux: 1 in perfect balance and E if one expert gets all, whatever E is."""
        num_experts = self.sent_E.shape[0]
        return num_experts**2 * self.aux_loss

    def by_name(self) -> dict[str, tf.Tensor]:
        """Returns the fields that the gating has, in their order."""
        return {name: value for name, value in vars(self).items() if value is not None}


def statistics(fields: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the metrics of a routing by name, given its fields.

    In place of sent_E there are load_E, the tokens of each expert divided by their mean, which is 1
    for all experts in perfect balance; max_load, the load of the busiest expert; and idle_experts,
    the number of experts without a token. All loads are 0 if no token was dispatched.
    """
    rest = {name: value for name, value in fields.items() if name != "sent_E"}
    sent_E = fields["sent_E"]
    num_experts = sent_E.shape[0]
    load_E = sent_E * num_experts / tf.maximum(tf.reduce_sum(sent_E), _FEWEST_SENT)
    return {
        **rest,
        "load_E": load_E,
        "max_load": tf.reduce_max(load_E),
        "idle_experts": tf.reduce_sum(tf.cast(sent_E == 0.0, tf.float32)),
    }


def at_least_one(num_tokens: tf.Tensor) -> tf.Tensor:
    """Returns the divisor that turns a sum over tokens into a mean: `num_tokens`, or 1 for 0."""
    return tf.maximum(num_tokens, 1.0)


# The fields of a Routing whose gradients train the layer.
LOSSES = frozenset({"aux_loss", "router_loss"})


@dataclasses.dataclass(frozen=True)
class Gates:
    """The result of a gating for all groups: k choices of each token, and statistics."""

    choices: tuple[Choice, ...]
    routing: Routing

    @property
    def k(self) -> int:
        """The number of a token's choices."""
        return len(self.choices)

    def occupied(self) -> tf.Tensor:
        """Returns how many positions the fullest buffer of an expert needs: an int32 scalar."""
        ends_GS = [
            (choice.position_GS + 1) * tf.cast(choice.kept_GS, tf.int32) for choice in self.choices
        ]
        return tf.reduce_max(functools.reduce(tf.maximum, ends_GS))

    def window(self, start: tf.Tensor, size: int) -> Self:
        """Keeps only the tokens at `size` positions from `start` on, which become 0 to size - 1."""

        def inside(choice: Choice) -> Choice:
            position_GS = choice.position_GS - start
            is_inside_GS = (position_GS >= 0) & (position_GS < size)
            kept_GS = choice.kept_GS * tf.cast(is_inside_GS, tf.float32)
            return dataclasses.replace(choice, position_GS=position_GS, kept_GS=kept_GS)

        return dataclasses.replace(self, choices=tuple(map(inside, self.choices)))


def routing(
    choices: Sequence[Choice],
    valid_GS: tf.Tensor,
    aux_loss: tf.Tensor,
    entropy_GS: tf.Tensor,
    *,
    own_GS: Mapping[str, tf.Tensor],
    router_loss: tf.Tensor | None,
    tokens_of_mean: Callable[[tf.Tensor], tf.Tensor] = at_least_one,
) -> Routing:
    """Returns the statistics of one layer's routing over the tokens of all groups.

    Args:
      choices: The choices of every token.
      valid_GS: 1 for tokens, 0 for padding.
      aux_loss: As in Routing.
      entropy_GS: The entropy of each token's gates in nats.
      own_GS: Fields of this gating alone, whose means over the tokens are taken.
      router_loss: As in Routing.
      tokens_of_mean: Context.tokens_of_mean.
    """
    # Where a token was dispatched to an expert, and where no expert took it.
    sent_GSE = tf.add_n([choice.mask_GSE * choice.kept_GS[..., None] for choice in choices])
    overflow_GS = valid_GS
    for choice in choices:
        overflow_GS *= 1.0 - choice.kept_GS

    sent_E, total = _sums_over_all_tokens(
        sent_GSE,
        tokens=valid_GS,
        overflow=overflow_GS,
        **own_GS,
        entropy=valid_GS * entropy_GS,
    )

    num_tokens = tokens_of_mean(total.tokens)
    return Routing(
        aux_loss=aux_loss,
        sent_E=sent_E,
        overflow=total.overflow / num_tokens,
        **{name: total[name] / num_tokens for name in own_GS},
        entropy=total.entropy / num_tokens,
        router_loss=router_loss,
    )


def _sums_over_all_tokens(
    sent_GSE: tf.Tensor, **by_name_GS: tf.Tensor
) -> tuple[tf.Tensor, NestedMap]:
    """Returns the sums over the tokens of all groups: of `sent_GSE`, [E], and by name, scalars."""
    num_experts = sent_GSE.shape[-1]
    named = tf.stack(list(by_name_GS.values()), -1)
    by_group = tf.concat([tf.reduce_sum(sent_GSE, 1), tf.reduce_sum(named, 1)], -1)

    # One tensor, so that groups on several devices are summed by a single all-reduce.
    totals = tf.reduce_sum(by_group, 0)

    sent_E = totals[:num_experts]
    scalars = tf.unstack(totals[num_experts:])
    return sent_E, NestedMap(zip(by_name_GS, scalars, strict=True))
