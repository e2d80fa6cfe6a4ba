"""Scores of hypotheses: s = log P / lp + cp (Wu et al. 2016, equation 14).

B batch, k beam, S source length.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def length_penalty(length: Any, alpha: float) -> Any:
    """lp = ((5 + length) / 6)^alpha of float lengths, tensors or numbers; 1 or more."""
    return ((5.0 + length) / 6.0) ** alpha


def coverage_penalty(attention: tf.Tensor, source_real: tf.Tensor, beta: float) -> tf.Tensor:
    """cp = beta * sum_i log(min(sum_j p_ij, 1)), i over the source's tokens; 0 or less.

    Args:
      attention: float32 [B, k, S], summed over a hypothesis' tokens.
      source_real: float32 [B, S], 1 for a token, 0 for padding.
      beta: the weight.

    Returns:
      float32 [B, k].
    """
    covered = tf.clip_by_value(attention, 1e-9, 1.0)  # The logarithm shall be finite.
    return beta * tf.einsum("BKS,BS->BK", tf.math.log(covered), source_real)


def best_possible(log_prob: tf.Tensor, max_length: tf.Tensor, alpha: float) -> tf.Tensor:
    """A bound on the score of whatever an active hypothesis may become.

    Let it have log-probability p <= 0 and end with q <= p at a length l <= L. As q <= 0 and
    0 < lp(l) <= lp(L) (alpha is not negative), q / lp(l) <= q / lp(L) <= p / lp(L); and cp <= 0.
    So its score q / lp(l) + cp is at most p / lp(L).

    Args:
      log_prob: p.
      max_length: float, L, the longest that it may become.
      alpha: of the length penalty.
    """
    return log_prob / length_penalty(max_length, alpha)
