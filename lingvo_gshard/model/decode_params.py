"""The settings of decoding, `decode` in an experiment's Params.

An experiment makes its own sizes the defaults of the REQUIRED ones.
"""

from lingvo_gshard.beam_search.beam import BeamSearch, Rules, Stopping
from lingvo_gshard.core.hyperparams import REQUIRED, BaseParams, setting
from lingvo_gshard.layers.stored_weights import Numbers


class DecodeParams(BaseParams):
    """The settings of every decoder."""

    batch_size: int = setting(REQUIRED, "The rows that are decoded together.")

    # The weights.
    checkpoint_step: int | None = setting(
        None, "The checkpoint to decode or export; None takes the latest one."
    )
    average_checkpoints: int = setting(
        1, "N: the weights are the mean over N checkpoints, up to and including this one."
    )


class SearchParams(DecodeParams):
    """The settings of flat beam search and sampling."""

    # The search: k and alpha of the original Transformer (Vaswani et al. 2017, section 6.1).
    beam_size: int = setting(4, "k, the active hypotheses of a sentence.")
    num_best: int = setting(1, "The hypotheses returned for each sentence, at most k.")
    length_norm_alpha: float = setting(0.6, "Length normalization's exponent (Wu et al., 2016).")
    rules: Rules = setting(Rules.WU, "WU, or HUGGING_FACE for transformers' scores and stopping.")
    stopping: Stopping = setting(
        Stopping.DECIDED, "DECIDED, or LIKELY or FIRST, which end earlier."
    )
    coverage_weight: float = setting(0.0, "The weight of the coverage penalty (Wu et al., 2016).")
    temperature: float | None = setting(
        None, "If set, tokens are sampled at this temperature; needs beam_size 1."
    )
    top_k: int | None = setting(
        None, "If set, only this many of the most probable tokens can be sampled."
    )
    top_p: float | None = setting(
        None,
        "If set, only the fewest tokens that together have this probability can be sampled.",
    )
    seed: int = setting(0, "The seed of sampling.")
    tell_attention: bool = setting(False, "Whether to return each token's attention.")

    # How the program computes it.
    weights: Numbers = setting(
        Numbers.FLOAT32,
        "How decoders store large weights: FLOAT32, FLOAT32_LAID_OUT, BFLOAT16 or INT8.",
    )
    min_stage_places: int = setting(
        128,
        "The least places by which the beam's caches grow; few are fast, but compile long.",
    )

    # Lengths and batches.
    min_target_len: int = setting(1, "The shortest hypothesis, in tokens including EOS.")
    max_target_len: int = setting(REQUIRED, "The longest hypothesis, in tokens.")
    max_sentences: int | None = setting(
        None, "The sentences of each language in --mode=decode; None decodes all."
    )

    def search(self) -> BeamSearch:
        """Returns the search of a row. Raises ValueError if a setting is out of its range."""
        return BeamSearch(
            beam_size=self.beam_size,
            max_steps=self.max_target_len,
            length_norm_alpha=self.length_norm_alpha,
            num_best=self._num_best_of_row(),
            coverage_weight=self.coverage_weight,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_stage_places=self.min_stage_places,
            rules=self.rules,
            stopping=self.stopping,
        )

    def _num_best_of_row(self) -> int:
        return self.num_best


class TranslationDecodeParams(SearchParams):
    """The settings of decoding translations."""

    max_source_len: int = setting(REQUIRED, "In tokens; longer sources are split.")
    forces_first: bool = setting(
        False,
        "Whether each row's input contains the first token of its translation: first_ids.",
    )


class ContinuationDecodeParams(SearchParams):
    """The settings of continuing a language model's prompts."""

    max_prompt_len: int = setting(REQUIRED, "The longest prompt, in tokens including BOS.")
    prompt_len: int = setting(
        REQUIRED,
        "The number of first tokens of a document, with BOS, that --mode=decode continues.",
    )

    def _num_best_of_row(self) -> int:
        """Returns 1 for samples: a row gives one, and num_best rows have the same prompt."""
        return self.num_best if self.temperature is None else 1
