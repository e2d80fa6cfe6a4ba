"""The translation task: an encoder-decoder MoE Transformer and its loss (sections 2.2, 4.3, A.2).

B batch, L target length, T source length, M model, V target vocabulary, k beam size, P cache
length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import causal_mask, segment_mask
from lingvo_gshard.layers.context import Context, LayerReport, Mode
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.products import Arithmetic
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.layers.transformer import Attended
from lingvo_gshard.layers.vocabulary import EmbeddingLayer, cross_entropies

_ACTIVATION_DTYPES = ("float32", "bfloat16")
_PRODUCT_DTYPES = (*_ACTIVATION_DTYPES, "auto")


class TranslationTask(BaseLayer):
    """Translates packed sequences. A token attends only to its own example."""

    source_embedding: EmbeddingLayer
    source_dropout: DropoutLayer
    target_embedding: EmbeddingLayer
    target_dropout: DropoutLayer
    encoder: TransformerStack
    decoder: TransformerStack

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()

        # The model.
        p.Define("source_vocab_size", REQUIRED, "The source vocabulary's pieces.", optional=int)
        p.Define("target_vocab_size", REQUIRED, "V, the target vocabulary's pieces.", optional=int)
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("encoder", TransformerStack.Params(), "The encoder.")
        p.Define("decoder", TransformerStack.Params(), "The decoder.")
        p.Define("input_dropout", DropoutLayer.Params(), "Dropout of the embeddings.")

        # Its loss.
        p.Define("label_smoothing", 0.0, "The target's probability mass spread over all pieces.")
        p.Define("aux_loss_weight", REQUIRED, "k / E^2, where k is the weight of a layer's l_aux.")

        # Its arithmetic.
        p.Define("activation_dtype", "float32", "Or bfloat16. Weights and router stay float32.")
        p.Define(
            "product_dtype",
            "float32",
            "What products round float32 factors to; auto: bfloat16 in runs on CPUs with AMX.",
        )
        return p

    def __init__(self, params: InstantiableParams, *args: Any) -> None:
        super().__init__(params, *args)
        p = self.p
        _check_dtype("activation_dtype", p.activation_dtype, _ACTIVATION_DTYPES)
        _check_dtype("product_dtype", p.product_dtype, _PRODUCT_DTYPES)
        if not 0 <= p.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing must be in [0, 1), got {p.label_smoothing}.")
        self._arithmetic = Arithmetic(p.product_dtype)

        # The source's side.
        source_embedding = EmbeddingLayer.Params().Set(vocab_size=p.source_vocab_size, dim=p.dim)
        self.CreateChild("source_embedding", source_embedding)
        self.CreateChild("source_dropout", p.input_dropout)
        self.CreateChild("encoder", p.encoder.Copy().Set(dim=p.dim))

        # The target's side, with a softmax of its own.
        target_embedding = EmbeddingLayer.Params().Set(vocab_size=p.target_vocab_size, dim=p.dim)
        self.CreateChild("target_embedding", target_embedding)
        self.CreateChild("target_dropout", p.input_dropout)
        decoder = p.decoder.Copy().Set(dim=p.dim)
        decoder.layer.has_source = True
        self.CreateChild("decoder", decoder)
        self.CreateVariable("softmax", gaussian((p.dim, p.target_vocab_size), "MV", fan_in=p.dim))

    def FProp(
        self, theta: NestedMap, features: NestedMap, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Computes the logits of every target position, with teacher forcing, float32 [B, L, V].

        `features` are int32 source_ids, source_segment_ids and source_positions [B, T], and
        target_ids (the labels shifted right), target_segment_ids and target_positions [B, L].
        Segment 0 is padding. Each layer's report has a name such as `encoder_1`.
        """
        context = dataclasses.replace(context, arithmetic=self._arithmetic)
        encoded, reports = self._encode(theta, features, context)

        # A target token attends to those before it, and to the source, of its own example.
        segments = features.target_segment_ids
        mask = segment_mask(segments, segments) * causal_mask(segments.shape[1])
        source_mask = segment_mask(segments, features.source_segment_ids)
        x = self._embed_target(theta, features.target_ids, features.target_positions, context)
        attended = Attended(
            mask,
            _valid_mask(segments),
            source_mask,
            encoded,
            positions=features.target_positions,
        )
        x, decoder_reports = self.decoder.FProp(theta.decoder, x, attended, context)

        reports |= _named("decoder", decoder_reports)
        return self._logits(theta, x), reports

    def NumTokens(self, labels: NestedMap) -> tf.Tensor:
        """Returns the tokens over which the loss is a mean: float32, a scalar."""
        return tf.reduce_sum(labels.target_weights)

    def Loss(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """L = l_nll + k * l_aux (section 2.2), summed over the MoE layers; a scalar.

        l_aux is 1 / E^2 in perfect balance, so k is aux_loss_weight * E^2 with the E of the layer:
        it weighs balance equally for any E, which may differ between encoder and decoder.

        `labels` are target_labels, int32 [B, L], and target_weights, float32 [B, L], 0 at padding.
        The metrics are loss; nll, in nats a token, without smoothing; aux_loss, the sum of l_aux
        without weights; num_tokens; padding, the share of positions without a token, by side;
        activation_norms, the root mean square of each layer's output; and routing, by field of
        Routing and layer.
        """
        logits, reports = self.FProp(theta, features, context)
        weights = labels.target_weights

        # l_nll of each token, with a share of the target's mass spread over all pieces.
        with tf.name_scope("softmax"):
            nll, spread = cross_entropies(logits, labels.target_labels)
        smoothed = nll + self.p.label_smoothing * (spread - nll)

        # Its mean over the tokens, which are none in a batch of padding.
        num_tokens = self.NumTokens(labels)
        per_token = 1.0 / context.tokens_of_mean(num_tokens)

        # l_aux, of which a dense model has none.
        routings = [report.routing for report in reports.values() if report.routing is not None]
        aux_loss = _sum([routing.aux_loss for routing in routings])
        balance_loss = _sum([routing.balance_loss for routing in routings])

        loss = tf.reduce_sum(smoothed * weights) * per_token + self.p.aux_loss_weight * balance_loss
        return loss, NestedMap(
            loss=loss,
            nll=tf.reduce_sum(nll * weights) * per_token,
            aux_loss=aux_loss,
            num_tokens=num_tokens,
            padding=NestedMap(
                source=1.0 - tf.reduce_mean(_valid_mask(features.source_segment_ids)),
                target=1.0 - tf.reduce_mean(_valid_mask(features.target_segment_ids)),
            ),
            activation_norms=NestedMap({name: report.rms for name, report in reports.items()}),
            routing=_routing_by_field(reports),
        )

    def InitDecode(
        self, theta: NestedMap, features: NestedMap, cache_len: int, *, attention_beam: int = 0
    ) -> NestedMap:
        """Encodes the source once and makes empty caches of length P for DecodeStep.

        With `attention_beam`, k, DecodeStep keeps tokens' `attention` [B, k, T] in the state.
        """
        # PREDICT chooses groups that divide the batch: any number and length of sentences will do.
        context = Context(Mode.PREDICT, arithmetic=self._arithmetic)
        encoded, _ = self._encode(theta, features, context)

        source_real = _valid_mask(features.source_segment_ids)
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
        scalar. `mask`, float [B, k, P], is 1 at the places of the flat beam that each one attends
        to. An all-zero row is an absent hypothesis, which takes no expert.
        """
        context = Context(Mode.PREDICT, arithmetic=self._arithmetic)
        positions = tf.fill(ids.shape, step)
        x = self._embed_target(theta, ids, positions, context)

        # All hypotheses of a sentence attend to its whole source.
        beam_size = ids.shape[1]
        source_mask = tf.tile(state.source_real[:, None], [1, beam_size, 1])
        place = tf.range(mask.shape[-1])[None]
        attended = Attended(
            mask,
            tf.reduce_max(mask, -1),
            source_mask,
            positions=positions,
            key_positions=place // beam_size,
        )
        x, cache, attention = self.decoder.ExtendStep(
            theta.decoder, x, state.cache, attended, step, context
        )

        state = NestedMap(state, cache=cache)
        if "attention" in state:
            state.attention = self.annotate(attention, "B__")
        return self._logits(theta, x), state

    def _encode(
        self, theta: NestedMap, features: NestedMap, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Encodes the source; as FProp, but returns [B, T, M] and the encoder's reports."""
        x = self.source_embedding.FProp(
            theta.source_embedding, features.source_ids, features.source_positions
        )
        x = tf.cast(x, self.p.activation_dtype)  # All later layers follow the dtype of their input.
        x = self.source_dropout.FProp(theta.source_dropout, x, "BLM", context)

        segments = features.source_segment_ids
        attended = Attended(
            segment_mask(segments, segments),
            _valid_mask(segments),
            positions=features.source_positions,
        )
        x, reports = self.encoder.FProp(theta.encoder, x, attended, context)
        return x, _named("encoder", reports)

    def _embed_target(
        self, theta: NestedMap, ids: tf.Tensor, positions: tf.Tensor, context: Context
    ) -> tf.Tensor:
        x = self.target_embedding.FProp(theta.target_embedding, ids, positions)
        x = tf.cast(x, self.p.activation_dtype)
        return self.target_dropout.FProp(theta.target_dropout, x, "BLM", context)

    def _logits(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("softmax"):
            # The sums of products of 16-bit activations stay float32.
            arithmetic = Arithmetic("bfloat16") if x.dtype == tf.bfloat16 else self._arithmetic
            logits = arithmetic.project("BLM,MV->BLV", tf.cast(x, tf.float32), theta.softmax)
        return self.annotate(logits, "ULV")


def _check_dtype(setting: str, dtype: str, allowed: Sequence[str]) -> None:
    if dtype not in allowed:
        raise ValueError(f"task.{setting} must be {' or '.join(allowed)}, got {dtype!r}.")


def _valid_mask(segment_ids: tf.Tensor) -> tf.Tensor:
    return tf.cast(segment_ids > 0, tf.float32)


def _named(stack: str, reports: list[LayerReport]) -> dict[str, LayerReport]:
    return {f"{stack}_{index}": report for index, report in enumerate(reports)}


def _sum(losses: list[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of scalars, of which there may be none."""
    return tf.add_n(losses) if losses else tf.constant(0.0)


def _routing_by_field(reports: dict[str, LayerReport]) -> NestedMap:
    """Returns the tensors of each field of Routing by layer; empty without MoE layers."""
    by_field = NestedMap()
    for layer, report in reports.items():
        if report.routing is None:
            continue
        for field, tensor in vars(report.routing).items():
            by_layer = by_field.setdefault(field, NestedMap())
            by_layer[layer] = tensor
    return by_field
