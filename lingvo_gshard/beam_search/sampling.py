"""Truncated sampling: the tokens that may be drawn, by top-k and by top-p.

B batch, k beam, V vocabulary.
"""

from __future__ import annotations

from lingvo_gshard.core.late import tf

# A float32 of 0 or more has as many bits besides its sign.
_BITS = 31


def may_be_drawn(scores: tf.Tensor, top_k: int | None, top_p: float | None) -> tf.Tensor:
    """Returns bool [B, k, V]: the tokens that top-k and then top-p keep, at least one.

    Top-k keeps the `top_k` most probable tokens (Fan et al., 2018). Top-p keeps the smallest set of
    the most probable tokens whose probabilities sum to `top_p` or more (Holtzman et al., 2020); if
    top-k came before, the probabilities are normalized over what it kept. Tokens of one score stay
    or go together. None keeps all.

    This is what Hugging Face's `generate` does, whose top-p keeps some of the tokens of one score,
    and ours all of them.

    Args:
      scores: float32 [B, k, V], logits or log-probabilities, divided by the temperature. Finite.
      top_k: At least 1.
      top_p: In (0, 1].
    """
    # How far each token is below the most probable one.
    below = tf.reduce_max(scores, -1, keepdims=True) - scores
    kept = tf.ones_like(below, tf.bool)

    if top_k is not None:
        kept = _first(below, tf.ones_like(below), tf.constant(float(top_k)))

    # A top_p of 1 keeps everything; the rounding of the sum must not decide.
    if top_p is not None and top_p < 1:
        mass = tf.where(kept, tf.exp(-below), 0.0)
        total = tf.reduce_sum(mass, -1, keepdims=True)  # [B, k, 1]
        kept &= _first(below, mass, top_p * total)

    return kept


def _first(below: tf.Tensor, weights: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    """Returns bool [B, k, V]: where the weights of all smaller numbers sum to less than `limit`.

    The numbers, `below`, are 0 or more. They are not sorted: the largest that is kept is found bit
    by bit, from sums over V. So a vocabulary that is split stays so, and partitions exchange one
    sum for each bit and row.
    """
    # Numbers from 0 on have the order of their bits, read as integers.
    order = tf.bitcast(below, tf.int32)

    # The loop compares as well. Outside it XLA may compute `below` once more, with other rounding,
    # and the largest number that is kept would not equal itself.
    def with_next_bit(
        bit: tf.Tensor, last: tf.Tensor, _: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        larger = last | tf.bitwise.left_shift(1, bit)
        before = tf.reduce_sum(tf.where(order < larger, weights, 0.0), -1, keepdims=True)
        last = tf.where(before < limit, larger, last)
        return bit - 1, last, order <= last

    start = (
        tf.constant(_BITS - 1),
        tf.zeros_like(order[..., :1]),  # [B, k, 1]
        tf.zeros_like(order, tf.bool),
    )
    _, _, kept = tf.while_loop(
        lambda bit, *_: bit >= 0, with_next_bit, start, maximum_iterations=_BITS
    )
    return kept
