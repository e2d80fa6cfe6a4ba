"""The settings, requests and results of a beam search.

B batch, k beam, n wanted hypotheses, S source length, T steps, P = T * k places.
"""

from __future__ import annotations

import dataclasses
import enum

from lingvo_gshard.core.late import tf

_MAX_STAGES = 4
# Normal numbers of float32.
_MIN_TEMPERATURE = 2.0**-126
_MAX_TEMPERATURE = 2.0**127


class Rules(enum.Enum):
    """How hypotheses are scored, and which of them count as finished.

    WU: scores are divided by ((5 + length) / 6)^alpha (Wu et al. 2016, equation 14). A hypothesis
    without EOS at the last step counts only if its example has finished none.

    HUGGING_FACE: as in transformers' `generate`. Scores are divided by length^alpha, and all
    hypotheses of the last step count, with or without EOS.

    A sample is the only hypothesis of its example, so rules change its score alone.
    """

    WU = "wu"
    HUGGING_FACE = "hugging_face"


class Stopping(enum.Enum):
    """When the search of an example ends: the `early_stopping` argument of transformers' generate.

    DECIDED: when no active hypothesis can still become one of the best; early_stopping="never".
    LIKELY: when the best active hypothesis would not be one of the best if it ended now;
      early_stopping=False.
    FIRST: as soon as there are enough finished hypotheses; early_stopping=True.
    """

    DECIDED = "decided"
    LIKELY = "likely"
    FIRST = "first"


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """The settings of a search.

    Greedy decoding is beam_size 1 with length_norm_alpha 0: then no longer hypothesis can win.
    Raises ValueError if a setting is out of its range.
    """

    # k, the number of active hypotheses of each example.
    beam_size: int
    # T, the maximum number of tokens in a hypothesis, including EOS.
    max_steps: int
    # alpha. A score is a log-probability divided by a power of the length in tokens, which includes
    # EOS and any forced token; see Rules.
    length_norm_alpha: float = 0.6
    # n, the number of finished hypotheses to return; None is k. The fewer, the shorter the search.
    num_best: int | None = None
    # beta of Wu et al.; above 0 the model's state must have `attention`.
    coverage_weight: float = 0.0
    # If set, each token is sampled from softmax(logits / temperature), and the hypothesis ends with
    # the first sampled EOS or, without one, at the last step; beam_size must be 1. None searches
    # for the best.
    temperature: float | None = None
    # If set, only the top_k most probable tokens can be sampled, and of these only the fewest whose
    # probabilities sum to top_p; see sampling.py. Both need a temperature.
    top_k: int | None = None
    top_p: float | None = None
    # The flat sequence grows in at most 4 stages of at least this many places. A stage does not
    # attend to the places of later stages, but each stage compiles its own loop.
    min_stage_places: int = 128
    rules: Rules = Rules.WU
    stopping: Stopping = Stopping.DECIDED
    bos_id: int = 1
    eos_id: int = 2

    def __post_init__(self) -> None:
        k = self.beam_size
        self._check("beam_size", k >= 1, "at least 1")
        self._check("max_steps", self.max_steps >= 1, "at least 1")
        self._check("length_norm_alpha", self.length_norm_alpha >= 0, "at least 0")
        self._check("coverage_weight", self.coverage_weight >= 0, "at least 0")
        self._check("min_stage_places", self.min_stage_places >= 1, "at least 1")

        if self.num_best is not None:
            self._check("num_best", 1 <= self.num_best <= k, f"1 to beam_size {k}")

        if self.temperature is not None:
            # As a float32, it must be neither 0 nor infinite.
            is_normal = _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE
            expected = f"from {_MIN_TEMPERATURE:.2g} to {_MAX_TEMPERATURE:.2g}"
            self._check("temperature", is_normal, expected)
            # A beam ranks its hypotheses against each other, and so would distort the samples.
            self._check("temperature", k == 1, f"None for beam_size {k}")

        if self.top_k is not None:
            self._check("top_k", self.top_k >= 1, "at least 1")
        if self.top_p is not None:
            self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        if self.temperature is None:
            # A search for the best hypothesis draws nothing at random.
            self._check("top_k", self.top_k is None, "None without a temperature")
            self._check("top_p", self.top_p is None, "None without a temperature")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError if top_k is above V."""
        if self.top_k is not None:
            self._check("top_k", self.top_k <= vocab_size, f"at most the vocabulary, {vocab_size}")

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            value = getattr(self, name)
            raise ValueError(f"BeamSearch: {name} must be {expected}, got {value}.")

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The number of steps taken at the end of each stage; the last is T."""
        places = self.max_steps * self.beam_size
        num_stages = min(_MAX_STAGES, places // self.min_stage_places, self.max_steps)
        num_stages = max(num_stages, 1)

        # Stage i ends after ceil(T * i / num_stages) steps; the negations round up.
        return tuple(-(-self.max_steps * i // num_stages) for i in range(1, num_stages + 1))

    @property
    def first_places(self) -> int:
        """The number of places of the first stage, which a model's caches need at the start."""
        return self.stage_ends[0] * self.beam_size

    @property
    def num_found(self) -> int:
        """n, the number of hypotheses that the search returns for each example."""
        return self.num_best or self.beam_size

    @property
    def num_kept(self) -> int:
        """The number of finished hypotheses that the search keeps and compares.

        transformers keeps k, however many it returns, and so searches longer.
        """
        return self.beam_size if self.rules is Rules.HUGGING_FACE else self.num_found


@dataclasses.dataclass(frozen=True)
class Requests:
    """The limits of each example's length in tokens, including EOS, and its forced first token."""

    min_steps: tf.Tensor  # int32 [B].
    max_steps: tf.Tensor  # int32 [B], at most T; 0 skips the example.
    seed: tf.Tensor  # For sampling, int32 [2] of the batch, or [B, 2] of each example.
    # int32 [B], the forced first token of an example's hypotheses, which costs nothing. A negative
    # number leaves the first token free; None leaves it free in all examples.
    first_ids: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """The best hypotheses of each example, best first."""

    # int32 [B, n, T]: the tokens, with EOS if the hypothesis ended, then zeros.
    ids: tf.Tensor
    # int32 [B, n], in tokens including EOS; 0 for a missing hypothesis. If the logits of an example
    # are not finite, all of its hypotheses are missing, except any that ended before.
    lengths: tf.Tensor
    # float32 [B, n], length-normalized log-probabilities plus the coverage penalty.
    scores: tf.Tensor
    # float32 [B, n, T], each given the tokens before it, then zeros.
    token_log_probs: tf.Tensor
    # float32 [B, n, T, S], from the tokens to the source, if the model reports its attention.
    attention: tf.Tensor | None
