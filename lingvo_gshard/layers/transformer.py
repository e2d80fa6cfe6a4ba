"""Pre-norm Transformer layers, and stacks in which every other layer is an MoE layer (section 2.1).

B batch, L length (of the target in a decoder), T source length, M model, N heads, D head size,
k beam size, P cache length: the positions of the flat beam.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from lingvo_gshard.core.base_layer import STACKED, BaseLayer
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import KeysValues, MultiHeadAttention
from lingvo_gshard.layers.context import Context, LayerReport, Products, computed
from lingvo_gshard.layers.dropout import DropoutLayer
from lingvo_gshard.layers.feed_forward import FeedForwardLayer, LayerNorm
from lingvo_gshard.layers.gating import Routing
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.pipeline import Pipeline, check_pipeline, microbatches_of
from lingvo_gshard.layers.repeat import Layers, Loop, Remat, recomputed
from lingvo_gshard.layers.slices import lengthened, write_at


@dataclasses.dataclass(frozen=True)
class Attended:
    """What tokens x [B, L, M] attend to. Masks are float32: 1 where they may, else 0."""

    mask: tf.Tensor  # [B, L, L], or [B, k, P] in a flat beam, for self-attention.
    valid_mask: tf.Tensor  # [B, L]: 0 for padding, and for what should take no expert.
    source_mask: tf.Tensor | None = None  # [B, L, T]; None in an encoder.
    encoded: tf.Tensor | None = None  # [B, T, M], the source; None in an encoder or a flat beam.


class TransformerLayer(BaseLayer):
    """Self-attention, in a decoder attention to the source, and a feed-forward or MoE layer."""

    self_norm: LayerNorm
    self_attention: MultiHeadAttention
    source_norm: LayerNorm
    source_attention: MultiHeadAttention
    feed_forward_norm: LayerNorm
    feed_forward: FeedForwardLayer | MoELayer

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("attention", MultiHeadAttention.Params(), "Self- and source attention.")
        p.Define("feed_forward", REQUIRED, "FeedForwardLayer.Params() or MoELayer.Params().")
        p.Define("has_source", False, "Whether this is a decoder's layer.")
        p.Define("residual_dropout", DropoutLayer.Params(), "Dropout before each residual sum.")
        return p

    def __init__(self, params: InstantiableParams, *args) -> None:
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
        self, theta: NestedMap, x: tf.Tensor, attended: Attended, context: Context
    ) -> tuple[tf.Tensor, LayerReport]:
        """Applies the layer to whole sequences x [B, L, M]; returns [B, L, M]."""
        h = self.self_norm.FProp(theta.self_norm, x)
        memory = self.self_attention.Project(theta.self_attention, h, context)
        x = self._attend("self", theta, x, h, memory, attended.mask, context)
        if attended.encoded is not None:
            h = self.source_norm.FProp(theta.source_norm, x)
            memory = self.source_attention.Project(
                theta.source_attention, attended.encoded, context
            )
            x = self._attend("source", theta, x, h, memory, attended.source_mask, context)
        x, routing = self._feed_forward(theta, x, attended.valid_mask, context)
        return x, LayerReport(tf.reduce_mean(tf.square(tf.cast(x, tf.float32))) ** 0.5, routing)

    def ExtendStep(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        attended: Attended,
        step: tf.Tensor,
        context: Context,
    ) -> tuple[tf.Tensor, NestedMap, tf.Tensor]:
        """Decodes one step of a flat beam (A.1): appends k positions to the cache and attends.

        x [B, k, M] is the newest token of every hypothesis; positions begin at step * k. The mask
        [B, k, P] is 1 at the positions of each hypothesis, including this step's. The cache holds
        self_keys [B, N, D, P] and self_values [B, N, P, D], in the layout of their products, since
        any other would be transposed in full at every step; source_keys and source_values likewise,
        with T for P.

        Returns [B, k, M]; the cache with this step's keys and values; and the attention to the
        source, averaged over the heads, float32 [B, k, T].
        """
        h = self.self_norm.FProp(theta.self_norm, x)
        new = self.self_attention.Project(theta.self_attention, h, context)
        position = step * x.shape[1]
        keys = write_at(cache.self_keys, tf.linalg.matrix_transpose(new.keys), position, axis=3)
        values = write_at(cache.self_values, new.values, position, axis=2)
        cache = NestedMap(cache, **self._own_cache(keys, values))
        memory = KeysValues(tf.linalg.matrix_transpose(cache.self_keys), cache.self_values)
        x = self._attend("self", theta, x, h, memory, attended.mask, context)
        h = self.source_norm.FProp(theta.source_norm, x)
        memory = KeysValues(tf.linalg.matrix_transpose(cache.source_keys), cache.source_values)
        weights = self.source_attention.Weights(
            theta.source_attention, h, memory, attended.source_mask, context
        )
        x = self._attend("source", theta, x, h, memory, attended.source_mask, context)
        x, _ = self._feed_forward(theta, x, attended.valid_mask, context)
        return x, cache, tf.reduce_mean(weights, 1)

    def InitCache(
        self, theta: NestedMap, encoded: tf.Tensor, cache_len: int, context: Context
    ) -> NestedMap:
        """An empty cache of length P, and the keys and values of `encoded` [B, T, M]."""
        source = self.source_attention.Project(theta.source_attention, encoded, context)
        batch, heads, _, head_dim = source.keys.shape
        keys = tf.zeros([batch, heads, head_dim, cache_len], source.keys.dtype)
        values = tf.zeros([batch, heads, cache_len, head_dim], source.keys.dtype)
        return NestedMap(
            self._own_cache(keys, values),
            source_keys=self.annotate(tf.linalg.matrix_transpose(source.keys), "BNDT"),
            source_values=source.values,
        )

    def GrowCache(self, cache: NestedMap, cache_len: int) -> NestedMap:
        """Pads the cache to length P."""
        keys = lengthened(cache.self_keys, cache_len, axis=3)
        values = lengthened(cache.self_values, cache_len, axis=2)
        return NestedMap(cache, **self._own_cache(keys, values))

    def _own_cache(self, keys: tf.Tensor, values: tf.Tensor) -> NestedMap:
        keys, values = self.annotate(keys, "BNDT"), self.annotate(values, "BNTD")
        return NestedMap(self_keys=keys, self_values=values)

    def _attend(
        self,
        block: str,
        theta: NestedMap,
        x: tf.Tensor,
        h: tf.Tensor,
        memory: KeysValues,
        mask: tf.Tensor,
        context: Context,
    ) -> tf.Tensor:
        """Adds to x what h, its norm, attends to; `block` is `self` or `source`."""
        name = f"{block}_attention"
        h = getattr(self, name).FProp(theta[name], h, memory, mask, context)
        return self._residual(block, theta, x, h, context)

    def _feed_forward(
        self, theta: NestedMap, x: tf.Tensor, valid_mask: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, Routing | None]:
        h, routing = self.feed_forward_norm.FProp(theta.feed_forward_norm, x), None
        if isinstance(self.feed_forward, MoELayer):
            h, routing = self.feed_forward.FProp(theta.feed_forward, h, valid_mask, context)
        else:
            h = self.feed_forward.FProp(theta.feed_forward, h, context)
        return self._residual("feed_forward", theta, x, h, context), routing

    def _residual(
        self, block: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor, context: Context
    ) -> tf.Tensor:
        name = f"{block}_dropout"
        h = getattr(self, name).FProp(theta[name], h, "BLM", context)
        return self.annotate(x + h, "BLM")


class TransformerStack(BaseLayer):
    """Layers and a final norm. A block is a dense layer and, if there are any, one with experts."""

    layers: list[TransformerLayer]  # UNROLLED: all layers.
    block: list[TransformerLayer]  # LOOP: the layers of one block; theta.block[j] holds stacks.
    norm: LayerNorm

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("num_layers", REQUIRED, "The number of layers, counted as in the paper.")
        p.Define("layer", TransformerLayer.Params(), "All layers, except their feed_forward.")
        p.Define("dense", FeedForwardLayer.Params(), "The feed-forward of even layers.")
        p.Define("moe", MoELayer.Params(), "The feed-forward of odd layers; None for dense ones.")
        p.Define("layers_as", Layers.UNROLLED, "How the program applies the layers.")
        p.Define("remat", Remat.NONE, "What the backward pass recomputes.")
        p.Define("stages", 1, "The stages of a pipeline (GPipe) for training; needs LOOP.")
        p.Define("microbatches", 1, "The parts of a batch that pass through the pipeline.")
        return p

    def __init__(self, params: InstantiableParams, *args) -> None:
        super().__init__(params, *args)
        p = self.p
        if p.num_layers < 1:
            raise ValueError(f"{self.path}: num_layers must be 1 or more, got {p.num_layers}.")
        kinds = [p.dense] if p.moe is None else [p.dense, p.moe]
        self._block_size = size = len(kinds)
        check_pipeline(self.path, p, size)
        layers = [
            p.layer.Copy().Set(dim=p.dim, feed_forward=kinds[i % size].Copy())
            for i in range(p.num_layers)
        ]
        if p.layers_as is Layers.UNROLLED:
            self.CreateChildren("layers", layers)
        elif p.num_layers % size:
            raise ValueError(
                f"{self.path}: LOOP needs whole blocks of {size} layers, got num_layers "
                f"{p.num_layers}; choose a multiple, or UNROLLED."
            )
        else:
            self.CreateChildren("block", layers[:size], stacked=p.num_layers // size)
        self.CreateChild("norm", LayerNorm.Params().Set(dim=p.dim))

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, attended: Attended, context: Context
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        """Applies all layers; see TransformerLayer.FProp. Returns one report for each layer."""
        shared = [] if attended.encoded is None else [attended.encoded]
        run = self._unrolled if self.p.layers_as is Layers.UNROLLED else self._repeated
        x, reports = run(theta, x, shared, attended, context)
        return self.norm.FProp(theta.norm, x), reports

    def InitCache(
        self, theta: NestedMap, encoded: tf.Tensor, cache_len: int, context: Context
    ) -> NestedMap:
        """The caches of all layers; see TransformerLayer.InitCache."""
        pairs = self._layers_and_weights(theta)
        return NestedMap(
            layers=[layer.InitCache(w, encoded, cache_len, context) for layer, w in pairs]
        )

    def GrowCache(self, cache: NestedMap, cache_len: int) -> NestedMap:
        """Pads the caches of all layers to length P."""
        any_layer = (self.layers if self.p.layers_as is Layers.UNROLLED else self.block)[0]
        return NestedMap(layers=[any_layer.GrowCache(c, cache_len) for c in cache.layers])

    def ExtendStep(
        self, theta: NestedMap, x: tf.Tensor, cache: NestedMap, *args
    ) -> tuple[tf.Tensor, NestedMap, tf.Tensor]:
        """Applies all layers and averages their attention; see TransformerLayer.ExtendStep."""
        caches, attentions = [], []
        pairs = self._layers_and_weights(theta)
        for (layer, weights), old in zip(pairs, cache.layers, strict=True):
            x, new, attention = layer.ExtendStep(weights, x, old, *args)
            caches.append(new)
            attentions.append(attention)
        attention = tf.add_n(attentions) / len(attentions)
        return self.norm.FProp(theta.norm, x), NestedMap(layers=caches), attention

    def _unrolled(
        self, theta: NestedMap, x: tf.Tensor, shared: list[tf.Tensor], *args
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        reports: list[LayerReport] = []
        for index, first in enumerate(range(0, self.p.num_layers, self._block_size)):
            layers = self.layers[first : first + self._block_size]
            weights = NestedMap(layers=theta.layers[first : first + self._block_size]).Flatten()
            block = functools.partial(self._apply, layers, *args, index)
            x, *tensors = recomputed(block, self.p.remat)(x, *shared, *weights)
            reports += _reports(layers, iter(tensors))
        return x, reports

    def _repeated(
        self, theta: NestedMap, x: tf.Tensor, shared: list, attended: Attended, context: Context
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        repeat = self._pipeline if self.p.stages > 1 and context.training else self._loop
        weight_dims = [spec.dims for spec in _weight_specs(self.block).Flatten()]
        run = repeat(attended, context, weight_dims)
        x, stacks = run(x, shared, NestedMap(layers=theta.block).Flatten(), self.p.remat)
        reports = [_reports(self.block, (s[i] for s in stacks)) for i in range(run.num_blocks)]
        return x, list(itertools.chain(*reports))

    def _loop(self, attended: Attended, context: Context, weight_dims: list[str]) -> Loop:
        return Loop(
            functools.partial(self._apply, self.block, attended, context),
            self.p.num_layers // self._block_size,
            self._annotator,
            x_dims="BLM",
            shared_dims=[] if attended.encoded is None else ["BTM"],
            weight_dims=weight_dims,
        )

    def _pipeline(self, attended: Attended, context: Context, weight_dims: list[str]) -> Pipeline:
        annotator = self._annotator.over(STACKED)
        dims = {"mask": "BL_", "valid_mask": "BL", "source_mask": "BL_"}
        masks = {
            name: microbatches_of(mask, dims[name], self.p.microbatches, self._annotator)
            for name, mask in vars(attended).items()
            if name in dims and mask is not None
        }
        layers = [layer.p.Instantiate(annotator, layer.path) for layer in self.block]

        def block(microbatch: tf.Tensor, index: tf.Tensor, *args: tf.Tensor) -> list[tf.Tensor]:
            now = {k: annotator.annotate(tf.gather(masks[k], microbatch), dims[k]) for k in masks}
            inner = context.in_microbatch(microbatch)
            return self._apply(layers, Attended(**now), inner, index, computed, *args)

        return Pipeline(
            block,
            self.p.num_layers // self._block_size,
            self.p.stages,
            self.p.microbatches,
            self._annotator,
            weight_dims,
        )

    def _apply(
        self,
        layers: list[TransformerLayer],
        attended: Attended,
        context: Context,
        index: int | tf.Tensor,
        products: Products,
        x: tf.Tensor,
        *rest: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Applies the layers of block `index`, as a repeat.Block."""
        first = index * self._block_size
        if attended.source_mask is not None:
            attended, rest = dataclasses.replace(attended, encoded=rest[0]), rest[1:]
        thetas = _weight_specs(layers).Pack(rest).layers
        reported = []
        for j, (layer, own) in enumerate(zip(layers, thetas, strict=True)):
            inner = context.in_layer(self.path, first + j, layer.path)
            inner = dataclasses.replace(inner, product=products)
            x, report = layer.FProp(own, x, attended, inner)
            reported += report.tensors()
        return [x, *reported]

    def _layers_and_weights(self, theta: NestedMap) -> list[tuple[TransformerLayer, NestedMap]]:
        """Each layer with its weights; in a LOOP, with its slices of the stacks."""
        if self.p.layers_as is Layers.UNROLLED:
            return list(zip(self.layers, theta.layers, strict=True))
        size = self._block_size
        return [
            (self.block[i % size], theta.block[i % size].Transform(lambda w, n=i // size: w[n]))
            for i in range(self.p.num_layers)
        ]


def _weight_specs(layers: list[TransformerLayer]) -> NestedMap:
    return NestedMap(layers=[layer.weight_specs for layer in layers])


def _reports(layers: list[TransformerLayer], tensors: Iterator[tf.Tensor]) -> list[LayerReport]:
    """Rebuilds the layers' reports from all their tensors in order."""
    experts = [isinstance(layer.feed_forward, MoELayer) for layer in layers]
    return [LayerReport.from_tensors(tensors, has_experts=each) for each in experts]
