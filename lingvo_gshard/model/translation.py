"""The translation task: an encoder-decoder MoE Transformer and its loss (sections 2.2, 4.3, A.2).

B batch, L target length, T source length, M model, V target vocabulary, k beam size, P cache
length.
"""

from __future__ import annotations

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
from lingvo_gshard.model.decode_params import TranslationDecodeParams
from lingvo_gshard.model.token_loss import named, token_loss, valid_mask
from lingvo_gshard.model.token_task import TokenTask, known_size
from lingvo_gshard.sharding.layout import TensorSpec


class TranslationTask(TokenTask):
    """Translates packed sequences. A token attends only to its own example."""

    INPUT_SEGMENTS = "source_segment_ids"
    STACKS: ClassVar[Mapping[str, str]] = {"encoder": "source_len", "decoder": "target_len"}
    VOCABULARIES: ClassVar[Mapping[str, str]] = {
        "source_vocab_size": r"theta\.source_embedding\..*",
        "target_vocab_size": r"theta\.(target_embedding\..*|softmax)",
    }

    source_embedding: EmbeddingLayer
    source_dropout: DropoutLayer
    target_embedding: EmbeddingLayer
    target_dropout: DropoutLayer
    encoder: TransformerStack
    decoder: TransformerStack

    class Params(TokenTask.Params):
        source_vocab_size: int | None = setting(REQUIRED, "The source vocabulary's pieces.")
        target_vocab_size: int | None = setting(REQUIRED, "V, the target vocabulary's pieces.")
        embedding: EmbeddingLayer.Params = setting(
            EmbeddingLayer.Params(), "The embeddings, except their sizes."
        )
        shared_embeddings: bool = setting(
            False, "Whether one table embeds both sides' pieces and is the softmax's weights, too."
        )
        start_piece: int | None = setting(
            None, "The piece whose embedding BOS has, at a target's first position; None: its own."
        )
        encoder: TransformerStack.Params = setting(TransformerStack.Params(), "The encoder.")
        decoder: TransformerStack.Params = setting(TransformerStack.Params(), "The decoder.")

    p: Params

    def __init__(self, params: Params, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        source_vocab_size = known_size("source_vocab_size", p.source_vocab_size)
        target_vocab_size = known_size("target_vocab_size", p.target_vocab_size)
        _check_pieces(p, source_vocab_size, target_vocab_size)

        # The source's side.
        if not p.shared_embeddings:
            source_embedding = p.embedding.Copy().Set(vocab_size=source_vocab_size, dim=p.dim)
            self.CreateChild("source_embedding", source_embedding)
        self.CreateChild("source_dropout", p.input_dropout)
        self.CreateChild("encoder", p.encoder.Copy().Set(dim=p.dim))

        # The target's side, with a separate softmax unless the table is shared.
        target_embedding = p.embedding.Copy().Set(vocab_size=target_vocab_size, dim=p.dim)
        self.CreateChild("target_embedding", target_embedding)
        self.CreateChild("target_dropout", p.input_dropout)
        decoder = p.decoder.Copy().Set(dim=p.dim)
        decoder.layer.has_source = True
        self.CreateChild("decoder", decoder)
        if not p.shared_embeddings:
            shape = (p.dim, target_vocab_size)
            softmax = gaussian(shape, "MV", fan_in=p.dim, use=Use.FACTOR)
            self.CreateVariable("softmax", softmax)

    @classmethod
    def DecodeLength(cls, decode: TranslationDecodeParams) -> int:
        return int(decode.max_source_len)

    @classmethod
    def DecodeSpecs(cls, decode: TranslationDecodeParams, rows: int, length: int) -> NestedMap:
        """Returns the specs of source_ids, source_segment_ids and source_positions.

        With decode.forces_first there are first_ids as well; see Predict.
        """
        spec = TensorSpec((rows, length), "int32", "BL")
        names = ("source_ids", "source_segment_ids", "source_positions")
        specs = NestedMap({name: spec for name in names})
        if decode.forces_first:
            specs.first_ids = TensorSpec((rows,), "int32", "B")
        return specs

    def FProp(
        self, theta: NestedMap, features: NestedMap, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Computes the logits of every target position, with teacher forcing, float32 [B, L, V].

        `features` are int32 source_ids, source_segment_ids and source_positions [B, T], and
        target_ids (the labels shifted right), target_segment_ids and target_positions [B, L].
        Segment 0 is padding. Each layer's report has a name such as `encoder_1`.
        """
        context = self._with_numerics(context).counted(_stack_tokens)
        encoded, reports = self._encode(theta, features, context)
        logits, decoder_reports = self._decode(theta, features, encoded, context)
        return logits, reports | decoder_reports

    def _decode(
        self, theta: NestedMap, features: NestedMap, encoded: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Returns FProp's logits, and the decoder's reports, given the encoded source [B, T, M]."""
        # A target token attends to the earlier tokens and the source of its own example.
        segments = features.target_segment_ids
        mask = segment_mask(segments, segments) * causal_mask(segments.shape[1])
        source_mask = segment_mask(segments, features.source_segment_ids)
        x = self._embed_target(theta, features.target_ids, features.target_positions, context)
        attended = Attended(
            mask,
            valid_mask(segments),
            source_mask,
            encoded,
            positions=features.target_positions,
        )
        x, reports = self.decoder.FProp(theta.decoder, x, attended, context)
        return self._logits(theta, x, context), named("decoder", reports)

    def NumTokens(self, labels: NestedMap) -> tf.Tensor:
        return tf.reduce_sum(labels.target_weights)

    def Loss(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns L of a batch, and the terms of its metrics; see token_loss.

        `labels` are target_labels, int32 [B, L], and target_weights, float32 [B, L], 0 at padding.
        This task adds the term padding, the share of positions without a token, by side.
        """
        layer_context = self._with_numerics(context).counted(_stack_tokens)
        encoded, reports = self._encode(theta, features, layer_context)
        logits, decoder_reports = self._decode(theta, features, encoded, layer_context)
        reports |= decoder_reports

        loss, terms = token_loss(
            self.p, logits, labels.target_labels, labels.target_weights, reports, context
        )
        terms.padding = NestedMap(
            source=1.0 - tf.reduce_mean(valid_mask(features.source_segment_ids)),
            target=1.0 - tf.reduce_mean(valid_mask(features.target_segment_ids)),
        )
        return loss, terms

    def InitDecode(
        self, theta: NestedMap, features: NestedMap, cache_len: int, *, attention_beam: int = 0
    ) -> NestedMap:
        """Encodes the source once and makes empty caches of length P for DecodeStep.

        With `attention_beam`, k, DecodeStep keeps tokens' `attention` [B, k, T] in the state.
        """
        context = self._decoding_context
        encoded, _ = self._encode(theta, features, context)

        source_real = valid_mask(features.source_segment_ids)
        cache = self.decoder.InitCache(theta.decoder, encoded, cache_len, context)
        state = NestedMap(cache=cache, source_real=source_real)
        if attention_beam:
            batch_size, source_len = source_real.shape
            state.attention = tf.zeros([batch_size, attention_beam, source_len])
        return state

    def GrowDecode(self, state: NestedMap, cache_len: int) -> NestedMap:
        """Pads the caches of a decoding state to length P."""
        return NestedMap(state, cache=self.decoder.GrowCache(state.cache, cache_len))

    def DecodeStep(
        self, theta: NestedMap, state: NestedMap, ids: tf.Tensor, mask: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """Decodes one step of a flat beam (A.1): the next token's logits, float32 [B, k, V].

        `ids`, int32 [B, k], are the newest tokens of the hypotheses, at position `step`, an int32
        scalar. `mask`, float [B, k, P], is 1 at the places of the flat beam to which each
        hypothesis attends. An all-zero row is an absent hypothesis, which takes no expert.
        """
        context = self._decoding_context
        # All rows have one position, so its sinusoids are computed once.
        x = self._embed_target(theta, ids, tf.reshape(step, [1, 1]), context)

        # All hypotheses of a sentence attend to its whole source.
        beam_size = ids.shape[1]
        source_mask = tf.tile(state.source_real[:, None], [1, beam_size, 1])
        place = tf.range(mask.shape[-1])[None]
        attended = Attended(
            mask,
            tf.reduce_max(mask, -1),
            source_mask,
            positions=tf.fill(ids.shape, step),
            key_positions=place // beam_size,
        )
        x, cache, attention = self.decoder.ExtendStep(
            theta.decoder, x, state.cache, attended, step * beam_size, context
        )

        state = NestedMap(state, cache=cache)
        if "attention" in state:
            state.attention = self.annotate(attention, "B__")
        return self._logits(theta, x, context), state

    def _encode(
        self, theta: NestedMap, features: NestedMap, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Encodes the source of FProp's `features`; returns [B, T, M] and the encoder's reports."""
        side = "target_embedding" if self.p.shared_embeddings else "source_embedding"
        embedding: EmbeddingLayer = getattr(self, side)
        x = embedding.FProp(theta[side], features.source_ids, features.source_positions, context)
        x = tf.cast(x, self.p.activation_dtype)  # All later layers follow the dtype of their input.
        x = self.source_dropout.FProp(theta.source_dropout, x, "BLM", context)

        segments = features.source_segment_ids
        mask = segment_mask(segments, segments)
        attended = Attended(
            mask,
            valid_mask(segments),
            positions=features.source_positions,
            whole_sentences=True,
            first_pieces=_first_pieces(features, mask),
        )
        x, reports = self.encoder.FProp(theta.encoder, x, attended, context)
        return x, named("encoder", reports)

    def _embed_target(
        self, theta: NestedMap, ids: tf.Tensor, positions: tf.Tensor, context: Context
    ) -> tf.Tensor:
        if self.p.start_piece is not None:
            ids = tf.where(positions == 0, self.p.start_piece, ids)
        x = self.target_embedding.FProp(theta.target_embedding, ids, positions, context)
        x = tf.cast(x, self.p.activation_dtype)
        return self.target_dropout.FProp(theta.target_dropout, x, "BLM", context)

    def _softmax(self, theta: NestedMap) -> Weight:
        if self.p.shared_embeddings:
            return Weight.of(theta.target_embedding.table).transposed()
        return super()._softmax(theta)


def _check_pieces(
    p: TranslationTask.Params, source_vocab_size: int, target_vocab_size: int
) -> None:
    """Raises ValueError if the vocabularies do not fit the settings about their pieces."""
    if p.shared_embeddings and source_vocab_size != target_vocab_size:
        raise ValueError(
            "task.shared_embeddings needs one vocabulary for sources and targets, got "
            f"source_vocab_size {source_vocab_size} and target_vocab_size {target_vocab_size}."
        )
    if p.start_piece is not None and not 0 <= p.start_piece < target_vocab_size:
        raise ValueError(
            f"task.start_piece must be 0 to {target_vocab_size - 1}, got {p.start_piece}."
        )


def _first_pieces(features: NestedMap, mask_BTT: tf.Tensor) -> tf.Tensor:
    """Returns the piece that begins each source token's sentence, int32 [B, T]; 0 for padding."""
    first_BT = tf.where(features.source_positions == 0, features.source_ids, 0)
    pieces_BTT = tf.cast(mask_BTT, tf.int32) * first_BT[:, None]
    return tf.reduce_sum(pieces_BTT, -1)


def _stack_tokens(features: NestedMap) -> dict[str, tf.Tensor]:
    """Returns the number of tokens that each stack sees; see Context.counted."""
    return {
        "encoder": tf.reduce_sum(valid_mask(features.source_segment_ids)),
        "decoder": tf.reduce_sum(valid_mask(features.target_segment_ids)),
    }
