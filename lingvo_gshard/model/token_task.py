"""The common parts of tasks that predict tokens: settings, arithmetic, the softmax, and decoding.

B batch, L length, M model, V vocabulary, k beam size, P cache length.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import Requests
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.layers.vocabulary import capped, check_cap
from lingvo_gshard.layers.weight import Weight
from lingvo_gshard.model import token_loss
from lingvo_gshard.model.decode_params import SearchParams
from lingvo_gshard.model.spec import MetricSums
from lingvo_gshard.model.task import Task

_ACTIVATION_DTYPES = ("float32", "bfloat16")
_PRODUCT_DTYPES = (*_ACTIVATION_DTYPES, "auto")


class TokenTask(Task):
    """Predicts packed sequences of tokens. A token attends only to its own example."""

    MODES = frozenset(Mode)
    UNIT = "target token"
    DIMS = "BLTGSMECHNDVRU"

    # The feature of Predict that is 0 where a row has no input.
    INPUT_SEGMENTS: ClassVar[str]

    class Params(Task.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        input_dropout: DropoutLayer.Params = setting(
            DropoutLayer.Params(), "Dropout of the embeddings."
        )

        # The loss.
        label_smoothing: float = setting(
            0.0, "The target's probability mass spread over all pieces."
        )
        aux_loss_weight: float = setting(
            REQUIRED, "k / E^2, where k is the weight of a layer's l_aux."
        )

        z_loss_weight: float = setting(0.0, "The weight of the softmax's z-loss; 1e-4 in Lingvo.")
        logit_cap: float | None = setting(
            None, "A bound of the softmax's logits z, as cap * tanh(z / cap); None for no bound."
        )

        # The arithmetic.
        activation_dtype: str = setting("float32", "Or bfloat16. Weights and router stay float32.")
        product_dtype: str = setting(
            "float32",
            "What products round float32 factors to; auto: bfloat16 in runs on CPUs fast at it.",
        )

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        _check_dtype("activation_dtype", p.activation_dtype, _ACTIVATION_DTYPES)
        _check_dtype("product_dtype", p.product_dtype, _PRODUCT_DTYPES)
        if not 0 <= p.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing must be in [0, 1), got {p.label_smoothing}.")
        if p.z_loss_weight < 0:
            raise ValueError(f"task.z_loss_weight must be 0 or more, got {p.z_loss_weight}.")
        check_cap("task.logit_cap", p.logit_cap)

        # PREDICT chooses groups that divide the batch, so any number and length of rows works.
        decoding = Numerics(p.product_dtype, is_decoding=True)
        self._decoding_context = Context(Mode.PREDICT, numerics=decoding)

    @classmethod
    def ProductDtype(cls, p: Params) -> str:
        return "bfloat16" if "bfloat16" in (p.product_dtype, p.activation_dtype) else "float32"

    def Metrics(self, terms: NestedMap) -> NestedMap:
        return token_loss.metrics(terms)

    def EvalMetrics(self, metrics: NestedMap) -> MetricSums:
        return token_loss.eval_metrics(metrics)

    def Predict(self, theta: NestedMap, features: NestedMap, decode: SearchParams) -> NestedMap:
        """Decodes by flat beam search (A.1) or by sampling.

        Returns the best hypotheses: ids, lengths, scores, token_log_probs, and perhaps attention.
        `features` are InitDecode's; rows without an input are fillers, which are not decoded. Two
        more are optional. `first_ids`, int32 [B], are tokens that each row's hypotheses begin with,
        such as a language's token, at no cost; a negative one is any token. `seeds`, int32 [B, 2],
        seed each row's one sample, which does not depend on the batch then; without them all rows
        use decode.seed, and a sample depends on its place in the batch. Raises ValueError if a
        setting is out of its range.
        """
        config = decode.search()
        requests = _requests(decode, features, self.INPUT_SEGMENTS)

        needs_attention = decode.tell_attention or decode.coverage_weight
        attention_beam = decode.beam_size if needs_attention else 0
        state = self.InitDecode(theta, features, config.first_places, attention_beam=attention_beam)
        step = functools.partial(self.DecodeStep, theta)
        hypotheses = flat_beam_search.search(
            config, step, state, requests, self.annotate, self.GrowDecode
        )

        predictions = NestedMap(
            ids=hypotheses.ids,
            lengths=hypotheses.lengths,
            scores=hypotheses.scores,
            token_log_probs=hypotheses.token_log_probs,
        )
        if decode.tell_attention:
            predictions.attention = hypotheses.attention
        return predictions

    def InitDecode(
        self, theta: NestedMap, features: NestedMap, cache_len: int, *, attention_beam: int = 0
    ) -> NestedMap:
        """Returns the state before the first step, with caches of P places.

        With `attention_beam`, k, the state has `attention`, for flat_beam_search.search.
        """
        raise NotImplementedError

    def GrowDecode(self, state: NestedMap, cache_len: int) -> NestedMap:
        """Pads the caches of a decoding state to P places."""
        raise NotImplementedError

    def DecodeStep(
        self, theta: NestedMap, state: NestedMap, ids: tf.Tensor, mask: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """Decodes one step of a flat beam (A.1): the next token's logits, float32 [B, k, V].

        `ids`, int32 [B, k], are the newest tokens of the hypotheses, of step `step`, an int32
        scalar. `mask`, float [B, k, P], is 1 at the places of the flat beam to which each
        hypothesis attends. An all-zero row is an absent hypothesis, which takes no expert.
        """
        raise NotImplementedError

    def _softmax(self, theta: NestedMap) -> Weight:
        """Returns the softmax's weights, [M, V]."""
        return Weight.of(theta.softmax)

    def _with_numerics(self, context: Context) -> Context:
        """Returns the context with the settings' dtype of products."""
        numerics = dataclasses.replace(context.numerics, dtype=self.p.product_dtype)
        return dataclasses.replace(context, numerics=numerics)

    def _logits(self, theta: NestedMap, x: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns float32 [B, L, V] of x [B, L, M]."""
        with tf.name_scope("softmax"):
            logits_ULV = context.einsum("ULM,MV->ULV", x, self._softmax(theta), wide=True)
            logits_ULV *= self._logit_scale
        return capped(self.annotate(logits_ULV, "ULV"), self.p.logit_cap)

    @property
    def _logit_scale(self) -> float:
        """What the products of the softmax's weights are multiplied by."""
        return 1.0


def _requests(decode: SearchParams, features: NestedMap, segments: str) -> Requests:
    """Returns the experiment's limits for each row that has an input."""
    if not 1 <= decode.min_target_len <= decode.max_target_len:
        raise ValueError(
            f"decode.min_target_len must be 1 to max_target_len {decode.max_target_len}, got "
            f"{decode.min_target_len}."
        )
    if not 0 <= decode.seed < 2**31:
        raise ValueError(f"decode.seed must be from 0 to 2**31 - 1, got {decode.seed}.")

    has_input = tf.reduce_max(tf.cast(features[segments] > 0, tf.int32), 1)
    batch = has_input.shape
    shortest = tf.fill(batch, decode.min_target_len)
    longest = tf.fill(batch, decode.max_target_len)
    seeds = features.get("seeds")
    if seeds is None:
        # The search adds the step to the first number. So no seed has another one's draws, shifted
        # by a step.
        seeds = tf.constant((0, decode.seed))
    return Requests(shortest, longest * has_input, seeds, features.get("first_ids"))


def known_size(setting: str, size: int | None) -> int:
    """Returns a vocabulary's size. Raises ValueError if it is None, as it is without any data."""
    if size is None:
        raise ValueError(f"task.{setting}: set the number of pieces, or give the data: --data_dir.")
    return size


def _check_dtype(setting: str, dtype: str, allowed: Sequence[str]) -> None:
    if dtype not in allowed:
        raise ValueError(f"task.{setting} must be {' or '.join(allowed)}, got {dtype!r}.")
