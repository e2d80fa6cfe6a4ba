"""Truncated sampling: the tokens that may be drawn, by top-k and by top-p.

B batch, k beam, V vocabulary.
"""

from __future__ import annotations

from lingvo_gshard.core.late import tf

# The number of bits of a non-negative float32, without its sign bit.
_BITS = 31


def may_be_drawn(
    log_probs: tf.Tensor,
    permitted: tf.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> tf.Tensor:
    """Returns bool [B, k, V]: the permitted tokens that top-k and then top-p keep.

    Top-k keeps the `top_k` most probable tokens (Fan et al., 2018). Top-p keeps the smallest set of
    the most probable tokens whose probabilities, at the temperature, sum to `top_p` or more
    (Holtzman et al., 2020). After top-k, the probabilities are normalized over the tokens that it
    kept. Equally probable tokens are kept or dropped together. None disables either filter.

    Hugging Face's `generate` does the same, except that its top-p may keep only some of several
    equally probable tokens.

    Args:
      log_probs: float32 [B, k, V], logits or log-probabilities. Finite.
      permitted: bool [B, k, V]. Other tokens have probability 0, whatever their `log_probs`.
      temperature: Divides the log-probabilities; above 0.
      top_k: At least 1.
      top_p: In (0, 1].
    """
    # How far each token is below the most probable one.
    log_probs = tf.where(permitted, log_probs, log_probs.dtype.min)
    below = tf.reduce_max(log_probs, -1, keepdims=True) - log_probs
    kept = permitted

    if top_k is not None:
        kept &= _first(below, tf.cast(permitted, tf.float32), tf.constant(float(top_k)))

    # A top_p of 1 keeps everything; the rounding of the sum must not decide.
    if top_p is not None and top_p < 1:
        mass = tf.where(kept, tf.exp(-below / temperature), 0.0)
        total = tf.reduce_sum(mass, -1, keepdims=True)  # [B, k, 1]
        kept &= _first(below, mass, top_p * total)

    return kept


def _first(below: tf.Tensor, weights: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
    """Returns bool [B, k, V]: where the weights of all smaller numbers sum to less than `limit`.

    The numbers, `below`, are 0 or more. They are not sorted: the largest number that is kept is
    found bit by bit, from sums over V. So a split vocabulary stays split, and partitions exchange
    one sum for each bit and row.
    """
    # Non-negative floats sort like their bits read as integers.
    order = tf.bitcast(below, tf.int32)

    # The comparison is inside the loop. Outside it, XLA may compute `below` a second time with
    # different rounding, and the largest number that is kept would not equal itself.
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
