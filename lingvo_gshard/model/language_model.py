"""The language modelling task: a decoder without a source, which predicts each next token.

B batch, L length, M model, V vocabulary, k beam size, T length of a prompt, P cache length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from lingvo_gshard.core.base_layer import Use, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import causal_mask, segment_mask
from lingvo_gshard.layers.context import Context, LayerReport
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.layers.transformer import Attended
from lingvo_gshard.layers.vocabulary import EmbeddingLayer
from lingvo_gshard.layers.weight import Weight
from lingvo_gshard.model.decode_params import ContinuationDecodeParams
from lingvo_gshard.model.spec import MetricSums
from lingvo_gshard.model.token_loss import named, token_loss, valid_mask
from lingvo_gshard.model.token_task import TokenTask, known_size
from lingvo_gshard.sharding.layout import TensorSpec


class LanguageModelTask(TokenTask):
    """Predicts each token of packed documents from the tokens before it."""

    INPUT_SEGMENTS = "segment_ids"
    STACKS: ClassVar[Mapping[str, str]] = {"decoder": "row_len"}
    VOCABULARIES: ClassVar[Mapping[str, str]] = {"vocab_size": r"theta\.(embedding\..*|softmax)"}
    SHOWN = ("bits_per_byte",)

    embedding: EmbeddingLayer
    dropout: DropoutLayer
    decoder: TransformerStack

    class Params(TokenTask.Params):
        vocab_size: int | None = setting(REQUIRED, "V, the vocabulary's pieces.")
        embedding: EmbeddingLayer.Params = setting(
            EmbeddingLayer.Params(), "The embedding of tokens."
        )
        decoder: TransformerStack.Params = setting(TransformerStack.Params(), "The layers.")
        tied_softmax: bool = setting(
            False, "Whether the softmax's weights are the embedding's table."
        )
        scaled_logits: bool = setting(False, "Whether logits are divided by sqrt(M), as T5's are.")

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        vocab_size = known_size("vocab_size", p.vocab_size)
        embedding = p.embedding.Copy().Set(vocab_size=vocab_size, dim=p.dim)
        self.CreateChild("embedding", embedding)
        self.CreateChild("dropout", p.input_dropout)
        self.CreateChild("decoder", p.decoder.Copy().Set(dim=p.dim))
        if not p.tied_softmax:
            softmax = gaussian((p.dim, vocab_size), "MV", fan_in=p.dim, use=Use.FACTOR)
            self.CreateVariable("softmax", softmax)

    @classmethod
    def DecodeLength(cls, decode: ContinuationDecodeParams) -> int:
        return int(decode.max_prompt_len)

    @classmethod
    def DecodeSpecs(cls, decode: ContinuationDecodeParams, rows: int, length: int) -> NestedMap:
        """Returns the specs of prompts: ids, segment_ids, positions and seeds; see Predict."""
        spec = TensorSpec((rows, length), "int32", "BL")
        seeds = TensorSpec((rows, 2), "int32", "B_")
        return NestedMap(ids=spec, segment_ids=spec, positions=spec, seeds=seeds)

    def FProp(
        self, theta: NestedMap, features: NestedMap, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Computes the logits of every position, float32 [B, L, V].

        `features` are ids (the labels shifted right), segment_ids and positions, int32 [B, L].
        Segment 0 is padding. Each layer's report has a name such as `decoder_1`.
        """
        context = self._with_numerics(context).counted(_stack_tokens)
        x = self._embed(theta, features.ids, features.positions, context)
        x, reports = self.decoder.FProp(theta.decoder, x, _attended(features), context)
        return self._logits(theta, x, context), named("decoder", reports)

    def NumTokens(self, labels: NestedMap) -> tf.Tensor:
        return tf.reduce_sum(labels.weights)

    def Loss(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns L of a batch, and the terms of its metrics; see token_loss.

        `labels` are labels, int32 [B, L]; weights, float32 [B, L], 0 at padding; and num_bytes,
        int32 [B, L], the bytes of text that each label stands for. This task adds the terms
        num_bytes, their sum, and padding.target, the share of positions without a token.
        """
        logits, reports = self.FProp(theta, features, context)
        loss, terms = token_loss(self.p, logits, labels.labels, labels.weights, reports, context)
        padding = 1.0 - tf.reduce_mean(valid_mask(features.segment_ids))
        terms.padding = NestedMap(target=padding)
        terms.num_bytes = tf.reduce_sum(tf.cast(labels.num_bytes, tf.float32))
        return loss, terms

    def EvalMetrics(self, metrics: NestedMap) -> MetricSums:
        """Returns TokenTask's metrics, and bits_per_byte: all nats over all bytes, in bits."""
        total_bits = metrics.nll * metrics.num_tokens / math.log(2)
        bits_per_byte = (total_bits, metrics.num_bytes)
        return {**super().EvalMetrics(metrics), "bits_per_byte": bits_per_byte}

    def InitDecode(
        self, theta: NestedMap, features: NestedMap, cache_len: int, *, attention_beam: int = 0
    ) -> NestedMap:
        """Reads the prompts once, and makes caches of them and of P empty places for DecodeStep.

        `features` are ids, segment_ids and positions, int32 [B, T]. A prompt is one segment from
        position 0 on: BOS and its tokens, then padding. Its last token is the input of the first
        step. Raises ValueError for an `attention_beam`, since there is no source.
        """
        if attention_beam:
            raise ValueError(
                "decode.tell_attention and decode.coverage_weight are about a source, which a "
                "language model does not have."
            )
        context = self._decoding_context
        x = self._embed(theta, features.ids, features.positions, context)
        cache = self.decoder.PromptCache(theta.decoder, x, _attended(features), cache_len, context)

        # The last token of each prompt. Later tokens attend to it only at the place of its own
        # step.
        is_token = tf.cast(features.segment_ids > 0, tf.int32)
        last = tf.maximum(tf.reduce_sum(is_token, 1) - 1, 0)
        is_before = tf.range(features.ids.shape[1]) < last[:, None]
        return NestedMap(
            cache=cache,
            last_ids=tf.gather(features.ids, last, batch_dims=1),
            last_positions=last,
            prompt_mask=self.annotate(tf.cast(is_before, tf.float32), "B_"),
        )

    def GrowDecode(self, state: NestedMap, cache_len: int) -> NestedMap:
        """Pads the caches of a decoding state to length P, after the prompts' places."""
        prompt_len = state.prompt_mask.shape[1]
        cache = self.decoder.GrowCache(state.cache, prompt_len + cache_len)
        return NestedMap(state, cache=cache)

    def DecodeStep(
        self, theta: NestedMap, state: NestedMap, ids: tf.Tensor, mask: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """Decodes one step of a flat beam (A.1): the next token's logits, float32 [B, k, V].

        `ids`, int32 [B, k], are the newest tokens of the hypotheses; step 0 uses the prompts' last
        tokens instead. `mask`, float [B, k, P], is 1 at the places of the flat beam to which each
        hypothesis attends; all hypotheses attend to the prompt. An all-zero row is an absent
        hypothesis, which takes no expert.
        """
        context = self._decoding_context
        beam_size = ids.shape[1]
        ids = tf.where(step == 0, state.last_ids[:, None], ids)

        # Places T, T + 1, ... continue from the prompt's last position, k places at a time.
        prompt_len = state.prompt_mask.shape[1]
        place = tf.range(mask.shape[-1])[None]
        last = state.last_positions[:, None]
        positions = tf.tile(last + step, [1, beam_size])
        prompt_positions = tf.tile(tf.range(prompt_len)[None], [ids.shape[0], 1])
        key_positions = tf.concat([prompt_positions, last + place // beam_size], 1)

        exists = tf.reduce_max(mask, -1)
        prompt_mask = exists[..., None] * state.prompt_mask[:, None]
        attended = Attended(
            tf.concat([prompt_mask, mask], -1),
            exists,
            positions=positions,
            key_positions=key_positions,
        )
        x = self._embed(theta, ids, positions, context)
        x, cache, _ = self.decoder.ExtendStep(
            theta.decoder, x, state.cache, attended, prompt_len + step * beam_size, context
        )
        return self._logits(theta, x, context), NestedMap(state, cache=cache)

    def _embed(
        self, theta: NestedMap, ids: tf.Tensor, positions: tf.Tensor, context: Context
    ) -> tf.Tensor:
        x = self.embedding.FProp(theta.embedding, ids, positions, context)
        x = tf.cast(x, self.p.activation_dtype)  # All later layers follow the dtype of their input.
        return self.dropout.FProp(theta.dropout, x, "BLM", context)

    def _softmax(self, theta: NestedMap) -> Weight:
        if self.p.tied_softmax:
            return Weight.of(theta.embedding.table).transposed()
        return super()._softmax(theta)

    @property
    def _logit_scale(self) -> float:
        return float(self.p.dim**-0.5) if self.p.scaled_logits else 1.0


def _stack_tokens(features: NestedMap) -> dict[str, tf.Tensor]:
    """Returns the number of tokens that the stack sees; see Context.counted."""
    return {"decoder": tf.reduce_sum(valid_mask(features.segment_ids))}


def _attended(features: NestedMap) -> Attended:
    """Returns the attended tokens: for each token, the earlier ones of its own document."""
    segments = features.segment_ids
    mask = segment_mask(segments, segments) * causal_mask(segments.shape[1])
    return Attended(mask, valid_mask(segments), positions=features.positions)
