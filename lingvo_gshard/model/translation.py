"""The translation task: an encoder-decoder MoE Transformer and its loss (sections 2.2, 4.3, A.2).

B batch, L target length, T source length, M model, V target vocabulary, k beam, P places of a
flat beam, E experts.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer, gaussian
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import causal_mask, segment_mask
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.cross_entropy import cross_entropies
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.embedding import EmbeddingLayer
from lingvo_gshard.layers.gating import Routing
from lingvo_gshard.layers.layer_report import LayerReport
from lingvo_gshard.layers.projection import project
from lingvo_gshard.layers.transformer import Source, TransformerStack

_SIDES = ("source", "target")
_ACTIVATION_DTYPES = ("float32", "bfloat16")


class TranslationTask(BaseLayer):
    """Translates packed source sequences; a token attends to its own example alone."""

    encoder: TransformerStack
    decoder: TransformerStack

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "source_vocab_size",
            REQUIRED,
            "Pieces of the source languages' vocabulary.",
            optional=int,
        )
        p.Define("target_vocab_size", REQUIRED, "V.", optional=int)
        p.Define("dim", REQUIRED, "M.")
        p.Define("encoder", TransformerStack.Params(), "")
        p.Define("decoder", TransformerStack.Params(), "")
        p.Define("input_dropout", DropoutLayer.Params(), "Of the embeddings.")
        p.Define("label_smoothing", 0.0, "The share of the target spread over all pieces.")
        p.Define("activation_dtype", "float32", "Or bfloat16; weights and router are float32.")
        p.Define("aux_loss_weight", REQUIRED, "k, the weight of each MoE layer's l_aux.")
        return p

    def __init__(self, params: hyperparams.Params, *args) -> None:
        super().__init__(params, *args)
        p = self.p
        if p.activation_dtype not in _ACTIVATION_DTYPES:
            raise ValueError(
                f"TranslationTask: activation_dtype must be {' or '.join(_ACTIVATION_DTYPES)}, "
                f"got {p.activation_dtype!r}."
            )
        if not 0 <= p.label_smoothing < 1:
            raise ValueError(
                f"TranslationTask: label_smoothing must be 0 to below 1, got {p.label_smoothing}."
            )
        for side, size in (("source", p.source_vocab_size), ("target", p.target_vocab_size)):
            embedding = EmbeddingLayer.Params().Set(vocab_size=size, dim=p.dim)
            self.CreateChild(f"{side}_embedding", embedding)
            self.CreateChild(f"{side}_dropout", p.input_dropout)
        self.CreateChild("encoder", p.encoder.Copy().Set(dim=p.dim))
        decoder = p.decoder.Copy().Set(dim=p.dim)
        self.CreateChild("decoder", decoder.Set(**{"layer.has_source": True}))
        shape = (p.dim, p.target_vocab_size)
        self.CreateVariable("softmax", gaussian(shape, "MV", fan_in=p.dim))

    def FProp(
        self, theta: NestedMap, features: NestedMap, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Logits of every target position, under teacher forcing.

        Args:
          theta: the weights.
          features: int32 [B, T] source_ids, source_segment_ids, source_positions and [B, L]
            target_ids (the labels shifted right), target_segment_ids, target_positions; segment
            0 is padding.
          context: the mode and seed.

        Returns:
          float32 [B, L, V], and each layer's report by name, such as `encoder_1`.
        """
        encoded, reports = self.Encode(theta, features, context)
        segments = features.target_segment_ids
        mask = segment_mask(segments, segments) * causal_mask(segments.shape[1])
        source = Source(encoded, segment_mask(segments, features.source_segment_ids))
        x = self._embed("target", theta, features.target_ids, features.target_positions, context)
        x, of_decoder = self.decoder.FProp(theta.decoder, x, mask, _real(segments), source, context)
        return self._logits(theta, x), reports | _named("decoder", of_decoder)

    def Encode(
        self, theta: NestedMap, features: NestedMap, context: Context
    ) -> tuple[tf.Tensor, dict[str, LayerReport]]:
        """Encodes the source: [B, T, M] and the reports; arguments as for FProp."""
        segments = features.source_segment_ids
        x = self._embed("source", theta, features.source_ids, features.source_positions, context)
        x, reports = self.encoder.FProp(
            theta.encoder, x, segment_mask(segments, segments), _real(segments), None, context
        )
        return x, _named("encoder", reports)

    def Loss(
        self, theta: NestedMap, features: NestedMap, labels: NestedMap, context: Context
    ) -> tuple[tf.Tensor, NestedMap]:
        """L = l_nll + k * l_aux (section 2.2), l_aux summed over the MoE layers.

        Args:
          theta: the weights.
          features: as for FProp.
          labels: target_labels int32 [B, L], target_weights float32 [B, L], 0 at padding.
          context: the mode and seed.

        Returns:
          The scalar loss and metrics: nll (nats a token, without smoothing), aux_loss,
          num_tokens, padding (the share of positions without a token) by side,
          activation_norms by layer (the root mean square of its output), and routing by field of
          Routing and MoE layer.
        """
        logits, reports = self.FProp(theta, features, context)
        weights = labels.target_weights
        with tf.name_scope("softmax"):
            nll, spread = cross_entropies(logits, labels.target_labels)
        smoothed = nll + self.p.label_smoothing * (spread - nll)
        num_tokens = tf.reduce_sum(weights)
        per_token = 1.0 / tf.maximum(num_tokens, 1.0)
        routings = {name: r.routing for name, r in reports.items() if r.routing is not None}
        aux_loss = tf.add_n([r.aux_loss for r in routings.values()] or [tf.constant(0.0)])
        loss = tf.reduce_sum(smoothed * weights) * per_token + self.p.aux_loss_weight * aux_loss
        return loss, NestedMap(
            loss=loss,
            nll=tf.reduce_sum(nll * weights) * per_token,
            aux_loss=aux_loss,
            num_tokens=num_tokens,
            padding=NestedMap({side: _padding(features, side) for side in _SIDES}),
            activation_norms=NestedMap({name: r.rms for name, r in reports.items()}),
            routing=_by_field(routings),
        )

    def InitDecode(
        self,
        theta: NestedMap,
        features: NestedMap,
        places: int,
        *,
        attention_beam: int | None = None,
    ) -> NestedMap:
        """Encodes the source once and makes empty caches of P places for DecodeStep.

        Args:
          theta: the weights.
          features: the source's, as for FProp.
          places: P.
          attention_beam: k, to have DecodeStep keep `attention` [B, k, T] in the state, what the
            newest tokens attended to; None: not.
        """
        # In this mode a group is a row: any number of sentences of any length will do.
        encoded, _ = self.Encode(theta, features, Context(Mode.DECODE))
        source_real = _real(features.source_segment_ids)
        state = NestedMap(
            cache=self.decoder.InitCache(theta.decoder, encoded, places), source_real=source_real
        )
        if attention_beam is not None:
            batch_size, source_len = source_real.shape
            state.attention = tf.zeros([batch_size, attention_beam, source_len])
        return state

    def GrowDecode(self, state: NestedMap, places: int) -> NestedMap:
        """The state of InitDecode, or of a DecodeStep, with caches of P places."""
        return NestedMap(state, cache=self.decoder.GrowCache(state.cache, places))

    def DecodeStep(
        self, theta: NestedMap, state: NestedMap, ids: tf.Tensor, mask: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """One step of a flat beam (A.1).

        Args:
          theta: the weights.
          state: of InitDecode or the step before.
          ids: int32 [B, k], the newest token of each hypothesis.
          mask: float [B, k, P], the places that each hypothesis attends to; one that attends to
            none is no hypothesis, and takes no expert.
          step: int32 scalar, the position of `ids`.

        Returns:
          float32 [B, k, V] logits of the next token, and the new state.
        """
        context = Context(Mode.DECODE)
        x = self._embed("target", theta, ids, tf.fill(ids.shape, step), context)
        source_mask = tf.tile(state.source_real[:, None], [1, ids.shape[1], 1])
        real = tf.reduce_max(mask, -1)
        x, cache, attention = self.decoder.ExtendStep(
            theta.decoder, x, state.cache, mask, source_mask, real, step, context
        )
        state = NestedMap(state, cache=cache)
        if "attention" in state:
            state.attention = self.annotate(attention, "B__")
        return self._logits(theta, x), state

    def _embed(
        self, side: str, theta: NestedMap, ids: tf.Tensor, positions: tf.Tensor, context: Context
    ) -> tf.Tensor:
        name = f"{side}_embedding"
        x = getattr(self, name).FProp(theta[name], ids, positions)
        x = tf.cast(x, self.p.activation_dtype)  # All later layers follow their input's dtype.
        name = f"{side}_dropout"
        return getattr(self, name).FProp(theta[name], x, "BLM", context)

    def _logits(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("softmax"):
            logits = project(x, theta.softmax)
        return self.annotate(tf.cast(logits, tf.float32), "BLV")


def _real(segment_ids: tf.Tensor) -> tf.Tensor:
    return tf.cast(segment_ids > 0, tf.float32)


def _padding(features: NestedMap, side: str) -> tf.Tensor:
    return 1.0 - tf.reduce_mean(_real(features[f"{side}_segment_ids"]))


def _named(stack: str, reports: list[LayerReport]) -> dict[str, LayerReport]:
    return {f"{stack}_{index}": report for index, report in enumerate(reports)}


def _by_field(routings: dict[str, Routing]) -> NestedMap:
    """Routing's fields, each a NestedMap from layers to tensors; empty without MoE layers."""
    fields = [field.name for field in dataclasses.fields(Routing)] if routings else []
    return NestedMap(
        {
            field: NestedMap({name: getattr(r, field) for name, r in routings.items()})
            for field in fields
        }
    )
