"""The settings, requests and results of a beam search.

B batch, k beam, n wanted hypotheses, S source length, T steps, P = T * k places.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.late import tf

_MAX_STAGES = 4


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """The settings of a search.

    Greedy decoding is beam_size 1 with length_norm_alpha 0: no longer hypothesis can then win.
    """

    beam_size: int  # k, the active hypotheses of each example.
    max_steps: int  # T, the maximum number of tokens in a hypothesis, including EOS.
    # Scores are log-probabilities divided by ((5 + length) / 6)^alpha (Wu et al. 2016, equation
    # 14), where the length is in tokens, including EOS.
    length_norm_alpha: float = 0.6
    # n finished hypotheses, None for k; the fewer, the shorter the search.
    num_best: int | None = None
    coverage_weight: float = 0.0  # beta of Wu et al.; above 0 the state must have `attention`.
    # If set, each token is sampled from softmax(logits / temperature) and the first sampled EOS
    # ends the hypothesis; beam_size must be 1. None searches for the best.
    temperature: float | None = None
    # The flat sequence grows in at most 4 stages of at least this many places. A stage does not
    # attend to the places of later stages, but compiles a loop of its own.
    min_stage_places: int = 128
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        k, n, temperature = self.beam_size, self.num_best, self.temperature
        for name, is_valid, expected in (
            ("beam_size", k >= 1, "at least 1"),
            ("max_steps", self.max_steps >= 1, "at least 1"),
            ("length_norm_alpha", self.length_norm_alpha >= 0, "at least 0"),
            ("num_best", n is None or 1 <= n <= k, f"1 to beam_size {k}"),
            ("coverage_weight", self.coverage_weight >= 0, "at least 0"),
            ("temperature", temperature is None or temperature > 0, "above 0"),
            ("temperature", temperature is None or k == 1, f"None for beam_size {k}"),
            ("min_stage_places", self.min_stage_places >= 1, "at least 1"),
        ):
            if not is_valid:
                given = getattr(self, name)
                raise ValueError(f"BeamSearch: {name} must be {expected}, got {given}.")

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The number of steps taken at the end of each stage; the last is T."""
        places = self.max_steps * self.beam_size
        num_stages = max(1, min(_MAX_STAGES, places // self.min_stage_places, self.max_steps))
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
    """The limits of each example's length in tokens, including EOS."""

    min_steps: tf.Tensor  # int32 [B].
    max_steps: tf.Tensor  # int32 [B], at most T; 0 skips the example.
    seed: tf.Tensor  # int32 [2], for sampling.


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """The best hypotheses of each example, best first."""

    ids: tf.Tensor  # int32 [B, n, T], each followed by EOS, if it ended, and then zeros.
    lengths: tf.Tensor  # int32 [B, n], tokens including EOS; 0 for missing hypotheses.
    # float32 [B, n], length-normalized log-probabilities plus the coverage penalty.
    scores: tf.Tensor
    token_log_probs: tf.Tensor  # float32 [B, n, T], each given the tokens before, then zeros.
    attention: tf.Tensor | None  # float32 [B, n, T, S], to the source, if the model reports it.
