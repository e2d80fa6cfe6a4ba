"""The settings, requests, results and scores of a beam search.

B batch, k beam, n wanted hypotheses, S source length, T steps, P = T * k places.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

_MAX_STAGES = 4


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """The settings of a search.

    Greedy decoding is beam_size 1 with length_norm_alpha 0: then no later hypothesis can beat
    one that ended with its most probable token.

    Attributes:
      beam_size: k, the active hypotheses of each example.
      max_steps: T, the maximum number of tokens in a hypothesis, including EOS.
      length_norm_alpha: scores are log-probabilities divided by ((5 + length) / 6)^alpha (Wu et
        al. 2016, equation 14), where the length is in tokens, including EOS.
      num_best: n, finished hypotheses kept for each example; None keeps k. With fewer, the search
        ends earlier.
      coverage_weight: beta of Wu et al.; above 0 the model's state must contain `attention`.
      temperature: if set, each token is sampled from softmax(logits / temperature) and the first
        sampled EOS ends the hypothesis; beam_size must be 1. None searches for the best.
      min_stage_places: the flat sequence grows in at most 4 stages of at least this many places.
        A stage does not attend to the places of later stages, but compiles a loop of its own.
      bos_id: the token before the first token of a hypothesis.
      eos_id: the token that ends a hypothesis.

    Raises:
      ValueError: a size is below 1, alpha or a weight is negative, num_best is above beam_size,
        or the temperature is not above 0 or is set for a beam of several hypotheses.
    """

    beam_size: int
    max_steps: int
    length_norm_alpha: float = 0.6
    num_best: int | None = None
    coverage_weight: float = 0.0
    temperature: float | None = None
    min_stage_places: int = 128
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        if self.beam_size < 1 or self.max_steps < 1 or self.length_norm_alpha < 0:
            raise ValueError(
                "BeamSearch: beam_size and max_steps must be at least 1 and length_norm_alpha at "
                f"least 0, got {self.beam_size}, {self.max_steps}, {self.length_norm_alpha}."
            )
        if self.min_stage_places < 1:
            raise ValueError(
                f"BeamSearch: min_stage_places must be at least 1, got {self.min_stage_places}."
            )
        if self.num_best is not None and not 1 <= self.num_best <= self.beam_size:
            raise ValueError(
                f"BeamSearch: num_best must be 1 to beam_size {self.beam_size}, got "
                f"{self.num_best}."
            )
        if self.coverage_weight < 0:
            raise ValueError(
                f"BeamSearch: coverage_weight must be at least 0, got {self.coverage_weight}."
            )
        if self.temperature is not None and (self.temperature <= 0 or self.beam_size > 1):
            raise ValueError(
                "BeamSearch: temperature must be above 0 and needs beam_size 1, got "
                f"{self.temperature} and {self.beam_size}."
            )

    @property
    def places(self) -> int:
        """P, the places of the whole flat sequence."""
        return self.max_steps * self.beam_size

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The number of steps taken at the end of each stage; the last is T."""
        num_stages = min(_MAX_STAGES, self.places // self.min_stage_places, self.max_steps)
        num_stages = max(1, num_stages)
        return tuple(-(-self.max_steps * i // num_stages) for i in range(1, num_stages + 1))

    @property
    def first_places(self) -> int:
        """The places of the first stage, which a model's caches need at the start."""
        return self.stage_ends[0] * self.beam_size

    @property
    def num_found(self) -> int:
        """n, the number of hypotheses that the search returns for each example."""
        return self.num_best or self.beam_size


@dataclasses.dataclass(frozen=True)
class Requests:
    """The limits of each example. Lengths are in tokens, including EOS.

    Attributes:
      min_steps: int32 [B], the minimum length.
      max_steps: int32 [B], the maximum length, at most T; 0 skips the example.
      seed: int32 [2], for sampling with a temperature.
    """

    min_steps: tf.Tensor
    max_steps: tf.Tensor
    seed: tf.Tensor

    @classmethod
    def alike(
        cls, batch_size: int, max_steps: int, min_steps: int = 1, seed: tuple[int, int] = (0, 0)
    ) -> Requests:
        """Returns the same limits for every example.

        Raises:
          ValueError: min_steps is not 1 to max_steps.
        """
        if not 1 <= min_steps <= max_steps:
            raise ValueError(
                f"Requests: min_steps must be 1 to max_steps {max_steps}, got {min_steps}."
            )
        return cls(
            tf.fill([batch_size], min_steps), tf.fill([batch_size], max_steps), tf.constant(seed)
        )

    @property
    def batch_size(self) -> int:
        """B."""
        return self.max_steps.shape[0]


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """The best hypotheses of each example, best first.

    Attributes:
      ids: int32 [B, n, T], each followed by EOS, if it ended, and then zeros.
      lengths: int32 [B, n], tokens including EOS; 0 for missing hypotheses.
      scores: float32 [B, n], length-normalized log-probabilities plus the coverage penalty.
      token_log_probs: float32 [B, n, T], of each token given the tokens before it, then zeros.
      attention: float32 [B, n, T, S], from each token to the source; None if the model does not
        report it.
    """

    ids: tf.Tensor
    lengths: tf.Tensor
    scores: tf.Tensor
    token_log_probs: tf.Tensor
    attention: tf.Tensor | None


def length_penalty(length: Any, alpha: float) -> Any:
    """Returns lp = ((5 + length) / 6)^alpha, at least 1, of float tensors or numbers."""
    return ((5.0 + length) / 6.0) ** alpha


def coverage_penalty(attention: tf.Tensor, source_mask: tf.Tensor, beta: float) -> tf.Tensor:
    """Returns cp = beta * sum_i log(min(sum_j p_ij, 1)) over source tokens i, at most 0.

    A score is log P / lp + cp (Wu et al. 2016, equation 14).

    Args:
      attention: float32 [B, k, S], summed over a hypothesis' tokens j.
      source_mask: float32 [B, S], 1 for tokens, 0 for padding.
      beta: the weight.

    Returns:
      float32 [B, k].
    """
    covered = tf.clip_by_value(attention, 1e-9, 1.0)  # Keeps the logarithm finite.
    return beta * tf.einsum("BKS,BS->BK", tf.math.log(covered), source_mask)


def best_possible(log_prob: tf.Tensor, max_length: tf.Tensor, alpha: float) -> tf.Tensor:
    """Returns an upper bound on the scores of all continuations of an active hypothesis.

    Let p <= 0 be its log-probability, and let a continuation end with q <= p at a length l <= L.
    Since q <= 0 and 0 < lp(l) <= lp(L) (alpha is not negative), q / lp(l) <= q / lp(L) <=
    p / lp(L). As cp <= 0, its score q / lp(l) + cp is at most p / lp(L).

    Args:
      log_prob: p.
      max_length: float, L, the maximum length.
      alpha: of the length penalty.
    """
    return log_prob / length_penalty(max_length, alpha)
