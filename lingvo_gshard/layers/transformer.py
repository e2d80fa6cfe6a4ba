"""Pre-norm Transformer layers and stacks, every other feed-forward layer an MoE layer (2.1).

B batch, L length (of the target in a decoder), T source length, M model, N heads, D head size,
k beam, P places in a flat beam.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.base_layer import BaseLayer
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import KeysValues, MultiHeadAttention
from lingvo_gshard.layers.cache import lengthened, write_at
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.gating import Routing
from lingvo_gshard.layers.layer_report import LayerReport
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.norm import LayerNorm
from lingvo_gshard.layers.products import Products
from lingvo_gshard.layers.repeat import Layers, Loop, Remat, recomputed


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
    ) -> tuple[tf.Tensor, LayerReport]:
        """Applies the layer to whole sequences.

        Args:
          theta: the weights.
          x: [B, L, M].
          mask: float [B, L, L], which positions self-attention may see.
          real: float [B, L], 1 for a token, 0 for padding.
          source: of a decoder's layer, else None.
          context: the mode and seed.

        Returns:
          [B, L, M], and what it tells of them.
        """
        h = self.self_norm.FProp(theta.self_norm, x)
        memory = self.self_attention.Project(theta.self_attention, h)
        h = self.self_attention.FProp(theta.self_attention, h, memory, mask, context)
        x = self._residual("self", theta, x, h, context)
        if source is not None:
            memory = self.source_attention.Project(theta.source_attention, source.encoded)
            x = self._attend_source(theta, x, memory, source.mask, context)
        x, routing = self._feed_forward(theta, x, real, context)
        return x, LayerReport(tf.sqrt(tf.reduce_mean(tf.square(tf.cast(x, tf.float32)))), routing)

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
    ) -> tuple[tf.Tensor, NestedMap, tf.Tensor]:
        """One decoding step of a flat beam (A.1): writes k places, attends to those in `mask`.

        Args:
          theta: the weights.
          x: [B, k, M], the newest token of every hypothesis.
          cache: self_keys [B, N, D, P] and self_values [B, N, P, D], as the products with them want
            them: whatever lay otherwise would be transposed, the whole of it, at every step.
            source_keys and source_values of T instead of P.
          mask: float [B, k, P], the places of each hypothesis, this step's included.
          source_mask: float [B, k, T].
          real: float [B, k], 0 where a token shall take no expert.
          step: int32 scalar; this step's keys go to places step * k and on.
          context: the mode.

        Returns:
          [B, k, M], the cache with this step's keys and values, and float32 [B, k, T], what was
          attended to of the source, the mean over heads.
        """
        h = self.self_norm.FProp(theta.self_norm, x)
        new = self.self_attention.Project(theta.self_attention, h)
        place = step * x.shape[1]
        keys = write_at(cache.self_keys, tf.linalg.matrix_transpose(new.keys), place, axis=3)
        values = write_at(cache.self_values, new.values, place, axis=2)
        cache = NestedMap(
            cache,
            self_keys=self.annotate(keys, "BNDT"),
            self_values=self.annotate(values, "BNTD"),
        )
        memory = KeysValues(tf.linalg.matrix_transpose(cache.self_keys), cache.self_values)
        h = self.self_attention.FProp(theta.self_attention, h, memory, mask, context)
        x = self._residual("self", theta, x, h, context)
        source = KeysValues(tf.linalg.matrix_transpose(cache.source_keys), cache.source_values)
        attention = self._source_weights(theta, x, source, source_mask)
        x = self._attend_source(theta, x, source, source_mask, context)
        return self._feed_forward(theta, x, real, context)[0], cache, attention

    def InitCache(self, theta: NestedMap, encoded: tf.Tensor, places: int) -> NestedMap:
        """An empty cache of P places beside the keys and values of encoded [B, T, M]."""
        source = self.source_attention.Project(theta.source_attention, encoded)
        batch, heads, _, head_dim = source.keys.shape
        keys = tf.zeros([batch, heads, head_dim, places], source.keys.dtype)
        values = tf.zeros([batch, heads, places, head_dim], source.keys.dtype)
        return NestedMap(
            self_keys=self.annotate(keys, "BNDT"),
            self_values=self.annotate(values, "BNTD"),
            source_keys=self.annotate(tf.linalg.matrix_transpose(source.keys), "BNDT"),
            source_values=source.values,
        )

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

    def _source_weights(
        self, theta: NestedMap, x: tf.Tensor, memory: KeysValues, mask: tf.Tensor
    ) -> tf.Tensor:
        h = self.source_norm.FProp(theta.source_norm, x)
        weights = self.source_attention.Weights(theta.source_attention, h, memory, mask)
        return tf.reduce_mean(weights, 1)

    def _feed_forward(
        self, theta: NestedMap, x: tf.Tensor, real: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing | None]:
        h, routing = self.feed_forward_norm.FProp(theta.feed_forward_norm, x), None
        if isinstance(self.feed_forward, MoELayer):
            h, routing = self.feed_forward.FProp(theta.feed_forward, h, real, context)
        else:
            h = self.feed_forward.FProp(theta.feed_forward, h, context)
        return self._residual("feed_forward", theta, x, h, context), routing

    def _residual(
        self, block: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor, context: Context
    ) -> tf.Tensor:
        name = f"{block}_dropout"
        h = getattr(self, name).FProp(theta[name], h, "BLM", context)
        return self.annotate(x + h, "BLM")


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """What all layers see alike and none has a gradient for; see TransformerLayer.FProp."""

    mask: tf.Tensor
    real: tf.Tensor
    source_mask: tf.Tensor | None
    context: Context


class TransformerStack(BaseLayer):
    """Layers on top of each other and a final norm; every other one has experts.

    Two layers, a dense one and one with experts, are a block; a single one where none has experts.
    """

    layers: list[TransformerLayer]  # UNROLLED: all of them.
    block: list[TransformerLayer]  # LOOP: those of one block; theta.block[j] holds stacks.
    norm: LayerNorm

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M.")
        p.Define("num_layers", REQUIRED, "Layers, counted as the paper does.")
        p.Define("layer", TransformerLayer.Params(), "Of every layer; feed_forward is set here.")
        p.Define("dense", FeedForwardLayer.Params(), "The feed-forward of even layers.")
        p.Define("moe", MoELayer.Params(), "The feed-forward of odd layers; None: dense ones.")
        p.Define("layers_as", Layers.UNROLLED, "LOOP needs whole blocks.")
        p.Define("remat", Remat.NONE, "What the backward pass computes again.")
        return p

    def __init__(self, params: hyperparams.Params, *args) -> None:
        super().__init__(params, *args)
        p = self.p
        if p.num_layers < 1:
            raise ValueError(f"{self.path}: num_layers must be 1 or more, got {p.num_layers}.")
        kinds = [p.dense] if p.moe is None else [p.dense, p.moe]
        self._block_size = len(kinds)
        layers = [
            p.layer.Copy().Set(dim=p.dim, feed_forward=kinds[i % len(kinds)].Copy())
            for i in range(p.num_layers)
        ]
        match p.layers_as:
            case Layers.UNROLLED:
                self.CreateChildren("layers", layers)
            case Layers.LOOP:
                num_blocks, rest = divmod(p.num_layers, len(kinds))
                if rest:
                    raise ValueError(
                        f"{self.path}: num_layers {p.num_layers} cannot be a LOOP over blocks of "
                        f"{len(kinds)} layers; choose a multiple, or UNROLLED."
                    )
                self.CreateChildren("block", layers[: len(kinds)], stacked=num_blocks)
        self.CreateChild("norm", LayerNorm.Params().Set(dim=p.dim))

    def FProp(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        mask: tf.Tensor,
        real: tf.Tensor,
        source: Source | None,
        context: Context,
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        """As TransformerLayer.FProp, through all layers; gives each one's report."""
        shared = [] if source is None else [source.encoded]
        fixed = _Fixed(mask, real, None if source is None else source.mask, context)
        match self.p.layers_as:
            case Layers.UNROLLED:
                x, reports = self._unrolled(theta, x, shared, fixed)
            case Layers.LOOP:
                x, reports = self._loop(theta, x, shared, fixed)
        return self.norm.FProp(theta.norm, x), reports

    def InitCache(self, theta: NestedMap, encoded: tf.Tensor, places: int) -> NestedMap:
        """Every layer's cache; see TransformerLayer.InitCache."""
        pairs = self._layers_and_weights(theta)
        return NestedMap(layers=[layer.InitCache(w, encoded, places) for layer, w in pairs])

    def GrowCache(self, cache: NestedMap, places: int) -> NestedMap:
        """Every layer's cache with room for P places, empty after those that it has."""

        def grown(layer: NestedMap) -> NestedMap:
            keys = lengthened(layer.self_keys, places, axis=3)
            values = lengthened(layer.self_values, places, axis=2)
            return NestedMap(
                layer,
                self_keys=self.annotate(keys, "BNDT"),
                self_values=self.annotate(values, "BNTD"),
            )

        return NestedMap(layers=[grown(layer) for layer in cache.layers])

    def ExtendStep(
        self, theta: NestedMap, x: tf.Tensor, cache: NestedMap, *args
    ) -> tuple[tf.Tensor, NestedMap, tf.Tensor]:
        """As TransformerLayer.ExtendStep, through all layers; the mean of what they attended to."""
        caches, attentions = [], []
        pairs = self._layers_and_weights(theta)
        for (layer, weights), old in zip(pairs, cache.layers, strict=True):
            x, new, attention = layer.ExtendStep(weights, x, old, *args)
            caches.append(new)
            attentions.append(attention)
        attention = tf.add_n(attentions) / len(attentions)
        return self.norm.FProp(theta.norm, x), NestedMap(layers=caches), attention

    def _unrolled(
        self, theta: NestedMap, x: tf.Tensor, shared: list[tf.Tensor], fixed: _Fixed
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        reports: list[LayerReport] = []
        for first in range(0, self.p.num_layers, self._block_size):
            layers = self.layers[first : first + self._block_size]
            weights = NestedMap(layers=theta.layers[first : first + self._block_size])
            block = functools.partial(self._block, layers, weights, fixed, first)
            x, *told = recomputed(block, self.p.remat)(x, *shared, *weights.Flatten())
            reports += _reports(layers, iter(told))
        return x, reports

    def _loop(
        self, theta: NestedMap, x: tf.Tensor, shared: list[tf.Tensor], fixed: _Fixed
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        num_blocks = self.p.num_layers // self._block_size
        weights = NestedMap(layers=theta.block)
        specs = NestedMap(layers=[layer.weight_specs for layer in self.block])

        def block(products: Products, index: tf.Tensor, *args: tf.Tensor) -> list[tf.Tensor]:
            first = index * self._block_size
            return self._block(self.block, weights, fixed, first, products, *args)

        loop = Loop(
            block,
            num_blocks,
            self._annotator,
            x_dims="BLM",
            shared_dims=["BTM"] * len(shared),
            weight_dims=[spec.dims for spec in specs.Flatten()],
        )
        x, told = loop(x, shared, weights.Flatten(), self.p.remat)
        reports: list[LayerReport] = []
        for index in range(num_blocks):
            reports += _reports(self.block, (stack[index] for stack in told))
        return x, reports

    def _block(
        self,
        layers: list[TransformerLayer],
        like: NestedMap,
        fixed: _Fixed,
        first: int | tf.Tensor,
        products: Products,
        x: tf.Tensor,
        *rest: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Layers number `first` and on as a repeat.Block: the output, the reports' tensors."""
        source, leaves = None, list(rest)
        if fixed.source_mask is not None:
            source = Source(leaves.pop(0), fixed.source_mask)
        told = []
        for j, (layer, theta) in enumerate(zip(layers, like.Pack(leaves).layers, strict=True)):
            context = fixed.context.in_layer(self.path, first + j, layer.path)
            context = dataclasses.replace(context, product=products)
            x, report = layer.FProp(theta, x, fixed.mask, fixed.real, source, context)
            told += report.tensors()
        return [x, *told]

    def _layers_and_weights(self, theta: NestedMap) -> list[tuple[TransformerLayer, NestedMap]]:
        """Every layer with its own weights."""
        if self.p.layers_as is Layers.UNROLLED:
            return list(zip(self.layers, theta.layers, strict=True))
        size = self._block_size
        return [
            (self.block[i % size], theta.block[i % size].Transform(lambda w, n=i // size: w[n]))
            for i in range(self.p.num_layers)
        ]


def _reports(layers: Sequence[TransformerLayer], tensors: Iterator[tf.Tensor]) -> list[LayerReport]:
    """The layers' reports, of their tensors one after the other."""
    experts = [isinstance(layer.feed_forward, MoELayer) for layer in layers]
    return [LayerReport.from_tensors(tensors, has_experts=each) for each in experts]
