"""What a beam search is asked for, and what it finds.

B batch, k beam, n hypotheses that are wanted, F tokens of a forced prefix, S source length,
T steps, P = T * k places.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

_MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """How to search.

    The most probable token at every step, and nothing else, is beam_size 1 with
    length_norm_alpha 0: an ending that was the likelier choice can then not be beaten.

    Attributes:
      beam_size: k, active hypotheses of each example.
      max_steps: T, the longest hypothesis in tokens, its EOS included.
      length_norm_alpha: scores are log-probabilities over ((5 + length) / 6)^alpha (Wu et al.
        2016, equation 14), length in tokens with the EOS.
      num_best: n, finished hypotheses kept for each example; None for k. Fewer end earlier.
      coverage_weight: beta of Wu et al.; above 0 the model's state must hold `attention`.
      temperature: with one, each token is drawn from softmax(logits / temperature), and the first
        EOS drawn ends the hypothesis; beam_size must be 1. None searches for the best.
      min_stage_places: the flat sequence is made longer as it fills, in at most 4 stages of as many
        places or more. A stage attends to no places of later ones, and has a loop of its own to
        compile.
      bos_id: what every hypothesis starts from; no part of it.
      eos_id: what ends one.

    Raises:
      ValueError: a size below 1, a negative alpha or weight, num_best above beam_size, or a
        temperature that is not above 0 or comes with a beam.
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
                "BeamSearch: beam_size and max_steps must be 1 or more and length_norm_alpha 0 "
                f"or more, got {self.beam_size}, {self.max_steps}, {self.length_norm_alpha}."
            )
        if self.min_stage_places < 1:
            raise ValueError(
                f"BeamSearch: min_stage_places must be 1 or more, got {self.min_stage_places}."
            )
        if self.num_best is not None and not 1 <= self.num_best <= self.beam_size:
            raise ValueError(
                f"BeamSearch: num_best must be 1 to beam_size {self.beam_size}, got "
                f"{self.num_best}."
            )
        if self.coverage_weight < 0:
            raise ValueError(
                f"BeamSearch: coverage_weight must be 0 or more, got {self.coverage_weight}."
            )
        if self.temperature is not None and (self.temperature <= 0 or self.beam_size > 1):
            raise ValueError(
                "BeamSearch: a temperature must be above 0 and goes with beam_size 1, got "
                f"{self.temperature} and {self.beam_size}."
            )

    @property
    def places(self) -> int:
        """P, the places of the whole flat sequence."""
        return self.max_steps * self.beam_size

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """How many steps have been taken when each stage ends, T at last."""
        num_stages = min(_MOST_STAGES, self.places // self.min_stage_places, self.max_steps)
        num_stages = max(1, num_stages)
        return tuple(-(-self.max_steps * i // num_stages) for i in range(1, num_stages + 1))

    @property
    def first_places(self) -> int:
        """The places of the first stage: what a model's caches hold at the start."""
        return self.stage_ends[0] * self.beam_size

    @property
    def num_found(self) -> int:
        """n."""
        return self.num_best or self.beam_size


@dataclasses.dataclass(frozen=True)
class Requests:
    """What each example asks of its hypotheses; lengths are in tokens with the EOS.

    Attributes:
      min_steps: int32 [B], the shortest.
      max_steps: int32 [B], the longest, at most T; at 0 nothing is searched for.
      prefix: int32 [B, F], tokens that every hypothesis begins with, then zeros; no EOS. They
        count in its length and its score. F may be 0.
      seed: int32 [2], of what a temperature draws.
    """

    min_steps: tf.Tensor
    max_steps: tf.Tensor
    prefix: tf.Tensor
    seed: tf.Tensor

    @classmethod
    def alike(
        cls, batch_size: int, max_steps: int, min_steps: int = 1, seed: tuple[int, int] = (0, 0)
    ) -> Requests:
        """The same limits for every example, and no prefix.

        Raises:
          ValueError: min_steps is not 1 to max_steps.
        """
        if not 1 <= min_steps <= max_steps:
            raise ValueError(
                f"Requests: min_steps must be 1 to max_steps {max_steps}, got {min_steps}."
            )
        return cls(
            tf.fill([batch_size], min_steps),
            tf.fill([batch_size], max_steps),
            tf.zeros([batch_size, 0], tf.int32),
            tf.constant(seed),
        )

    @property
    def batch_size(self) -> int:
        """B."""
        return self.max_steps.shape[0]


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """The best hypotheses of each example, best first.

    Attributes:
      ids: int32 [B, n, T], ended by EOS and then zeros; one that never ended has none.
      lengths: int32 [B, n], tokens with the EOS; 0 where fewer than n were found.
      scores: float32 [B, n], length-normalized log-probabilities with the coverage term.
      token_log_probs: float32 [B, n, T], of each token given those before; 0 after the last.
      attention: float32 [B, n, T, S], what each token attended to; None unless the model tells.
    """

    ids: tf.Tensor
    lengths: tf.Tensor
    scores: tf.Tensor
    token_log_probs: tf.Tensor
    attention: tf.Tensor | None
