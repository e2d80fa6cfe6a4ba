"""Pre-norm Transformer layers and stacks, every other feed-forward layer an MoE layer (2.1).

B batch, L length (of the target in a decoder), T source length, M model, N heads, D head size,
k beam, P places in a flat beam.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import KeysValues, MultiHeadAttention
from lingvo_gshard.layers.cache import write_at
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.moe import MoELayer, Routing
from lingvo_gshard.layers.norm import LayerNorm


@dataclasses.dataclass(frozen=True)
class Source:
    """What a decoder attends to: the encoder's output [B, T, M] and a mask [B, L, T]."""

    encoded: tf.Tensor
    mask: tf.Tensor


class TransformerLayer(BaseLayer):
    """Self-attention, attention to a source in a decoder, and a feed-forward or MoE layer."""

    self_norm: LayerNorm
    self_attention: MultiHeadAttention
    source_norm: LayerNorm
    source_attention: MultiHeadAttention
    feed_forward_norm: LayerNorm
    feed_forward: FeedForwardLayer | MoELayer

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M.")
        p.Define("attention", MultiHeadAttention.Params(), "Of self- and cross-attention.")
        p.Define("feed_forward", REQUIRED, "FeedForwardLayer.Params() or MoELayer.Params().")
        p.Define("has_source", False, "Whether this is a decoder's layer.")
        p.Define("residual_dropout", DropoutLayer.Params(), "Before each residual sum.")
        return p

    def __init__(self, params: hyperparams.Params, *args) -> None:
        super().__init__(params, *args)
        p = self.p
        blocks = ["self", "source", "feed_forward"] if p.has_source else ["self", "feed_forward"]
        for block in blocks:
            self.CreateChild(f"{block}_norm", LayerNorm.Params().Set(dim=p.dim))
            self.CreateChild(f"{block}_dropout", p.residual_dropout)
            if block != "feed_forward":
                self.CreateChild(f"{block}_attention", p.attention.Copy().Set(dim=p.dim))
        self.CreateChild("feed_forward", p.feed_forward.Copy().Set(dim=p.dim))

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        mask: tf.Tensor,
        real: tf.Tensor,
        source: Source | None,
        context: Context,
    ) -> tuple[tf.Tensor, Routing | None]:
        """Applies the layer to whole sequences.

        Args:
          theta: the weights.
          x: [B, L, M].
          mask: float [B, L, L], which positions self-attention may see.
          real: float [B, L], 1 for a token, 0 for padding.
          source: of a decoder's layer, else None.
          context: the mode and seed.

        Returns:
          [B, L, M], and the routing of an MoE layer, else None.
        """
        h = self.self_norm.FProp(theta.self_norm, x)
        memory = self.self_attention.Project(theta.self_attention, h)
        h = self.self_attention.FProp(theta.self_attention, h, memory, mask, context)
        x = self._residual("self", theta, x, h, context)
        if source is not None:
            memory = self.source_attention.Project(theta.source_attention, source.encoded)
            x = self._attend_source(theta, x, memory, source.mask, context)
        return self._feed_forward(theta, x, real, context)

    def ExtendStep(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        mask: tf.Tensor,
        source_mask: tf.Tensor,
        real: tf.Tensor,
        step: tf.Tensor,
        context: Context,
    ) -> tuple[tf.Tensor, NestedMap]:
        """One decoding step of a flat beam (A.1): writes k places, attends to those in `mask`.

        Args:
          theta: the weights.
          x: [B, k, M], the newest token of every hypothesis.
          cache: self_keys and self_values [B, P, N, D], source_keys and source_values [B, T, N, D].
          mask: float [B, k, P], the places of each hypothesis, this step's included.
          source_mask: float [B, k, T].
          real: float [B, k], 0 where a token shall take no expert.
          step: int32 scalar; this step's keys go to places step * k and on.
          context: the mode.

        Returns:
          [B, k, M], and the cache with this step's keys and values.
        """
        h = self.self_norm.FProp(theta.self_norm, x)
        new = self.self_attention.Project(theta.self_attention, h)
        cache = NestedMap(
            cache,
            self_keys=self._write(cache.self_keys, new.keys, step),
            self_values=self._write(cache.self_values, new.values, step),
        )
        memory = KeysValues(cache.self_keys, cache.self_values)
        h = self.self_attention.FProp(theta.self_attention, h, memory, mask, context)
        x = self._residual("self", theta, x, h, context)
        source = KeysValues(cache.source_keys, cache.source_values)
        x = self._attend_source(theta, x, source, source_mask, context)
        return self._feed_forward(theta, x, real, context)[0], cache

    def InitCache(self, theta: NestedMap, encoded: tf.Tensor, places: int) -> NestedMap:
        """An empty cache of P places beside the keys and values of encoded [B, T, M]."""
        source = self.source_attention.Project(theta.source_attention, encoded)
        batch, _, heads, head_dim = source.keys.shape
        empty = tf.zeros([batch, places, heads, head_dim], source.keys.dtype)
        empty = self.annotate(empty, "BTND")
        return NestedMap(
            self_keys=empty,
            self_values=empty,
            source_keys=source.keys,
            source_values=source.values,
        )

    def _write(self, cache: tf.Tensor, new: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return self.annotate(write_at(cache, new, step * new.shape[1]), "BTND")

    def _attend_source(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        memory: KeysValues,
        mask: tf.Tensor,
        context: Context,
    ) -> tf.Tensor:
        h = self.source_norm.FProp(theta.source_norm, x)
        h = self.source_attention.FProp(theta.source_attention, h, memory, mask, context)
        return self._residual("source", theta, x, h, context)

    def _feed_forward(
        self, theta: NestedMap, x: tf.Tensor, real: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing | None]:
        h, routing = self.feed_forward_norm.FProp(theta.feed_forward_norm, x), None
        if isinstance(self.feed_forward, MoELayer):
            h, routing = self.feed_forward.FProp(theta.feed_forward, h, real, context)
        else:
            h = self.feed_forward.FProp(theta.feed_forward, h)
        return self._residual("feed_forward", theta, x, h, context), routing

    def _residual(
        self, block: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor, context: Context
    ) -> tf.Tensor:
        name = f"{block}_dropout"
        h = getattr(self, name).FProp(theta[name], h, "BLM", context)
        return self.annotate(x + h, "BLM")


class TransformerStack(BaseLayer):
    """Layers on top of each other and a final norm; every other one has experts."""

    layers: list[TransformerLayer]
    norm: LayerNorm

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M.")
        p.Define("num_layers", REQUIRED, "Layers, counted as the paper does.")
        p.Define("layer", TransformerLayer.Params(), "Of every layer; feed_forward is set here.")
        p.Define("dense", FeedForwardLayer.Params(), "The feed-forward of even layers.")
        p.Define("moe", MoELayer.Params(), "The feed-forward of odd layers; None: dense ones.")
        return p

    def __init__(self, params: hyperparams.Params, *args) -> None:
        super().__init__(params, *args)
        p = self.p
        layers = []
        for i in range(p.num_layers):
            sparse = i % 2 == 1 and p.moe is not None
            feed_forward = p.moe if sparse else p.dense
            layers.append(p.layer.Copy().Set(dim=p.dim, feed_forward=feed_forward.Copy()))
        self.CreateChildren("layers", layers)
        self.CreateChild("norm", LayerNorm.Params().Set(dim=p.dim))

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        mask: tf.Tensor,
        real: tf.Tensor,
        source: Source | None,
        context: Context,
    ) -> tuple[tf.Tensor, dict[int, Routing]]:
        """As TransformerLayer.FProp; gives the routing of every MoE layer by its index."""
        routings = {}
        for i, layer in enumerate(self.layers):
            x, routing = layer.FProp(theta.layers[i], x, mask, real, source, context)
            if routing is not None:
                routings[i] = routing
        return self.norm.FProp(theta.norm, x), routings

    def InitCache(self, theta: NestedMap, encoded: tf.Tensor, places: int) -> NestedMap:
        """Every layer's cache; see TransformerLayer.InitCache."""
        pairs = zip(self.layers, theta.layers, strict=True)
        return NestedMap(layers=[layer.InitCache(w, encoded, places) for layer, w in pairs])

    def ExtendStep(
        self, theta: NestedMap, x: tf.Tensor, cache: NestedMap, *args
    ) -> tuple[tf.Tensor, NestedMap]:
        """As TransformerLayer.ExtendStep, through all layers."""
        caches = []
        for layer, weights, old in zip(self.layers, theta.layers, cache.layers, strict=True):
            x, new = layer.ExtendStep(weights, x, old, *args)
            caches.append(new)
        return self.norm.FProp(theta.norm, x), NestedMap(layers=caches)
