"""A stack of Transformer layers, of which every other or n-th one may have experts (section 2.1).

The program applies its layers in one of three ways, with the same results: unrolled, each with its
own instructions; as a loop over blocks (repeat.py); or, for training, as a pipeline of stages
(pipeline.py). A block is a dense layer alone or, with experts, as many layers as `moe_every`, of
which the last one has them.

B batch, L length (of the target in a decoder), T source length, M model, k beam size, P cache
length; R blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lingvo_gshard.core.base_layer import STACKED, BaseLayer
from lingvo_gshard.core.hyperparams import REQUIRED, InstantiableParams
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import cached_decoding, stored_weights
from lingvo_gshard.layers.context import Context, LayerReport, Products, computed
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.norms import LayerNorm, RMSNorm
from lingvo_gshard.layers.pipeline import Pipeline, check_pipeline, microbatches_of
from lingvo_gshard.layers.repeat import Carried, Layers, Loop, Remat, Tensors, apply_block
from lingvo_gshard.layers.slices import Item
from lingvo_gshard.layers.transformer import Attended, TransformerLayer

# The dims of the fields of Attended that have something for each token: masks and positions.
_MASK_DIMS = {"mask": "BL_", "valid_mask": "BL", "source_mask": "BL_", "positions": "BL"}


class TransformerStack(BaseLayer):
    """Layers and a final norm."""

    layers: list[TransformerLayer]  # UNROLLED: all layers.
    block: list[TransformerLayer]  # LOOP: the layers of one block; theta.block[j] holds stacks.
    norm: LayerNorm | RMSNorm

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define("dim", REQUIRED, "M, the model dimension.")
        p.Define("num_layers", REQUIRED, "The number of layers, counted as in the paper.")
        p.Define("layer", TransformerLayer.Params(), "All layers, except their feed_forward.")
        p.Define("dense", FeedForwardLayer.Params(), "The feed-forward of layers without experts.")
        p.Define("moe", MoELayer.Params(), "That of every n-th layer; None if all are dense.")
        p.Define("moe_every", 2, "n: layers n - 1, 2n - 1, ..., counted from 0, have experts.")
        p.Define("layers_as", Layers.UNROLLED, "How the program applies the layers.")
        p.Define("remat", Remat.NONE, "What the backward pass recomputes.")
        kept = "The dtype in which remat keeps what is inside a layer; None for its own."
        p.Define("kept_hidden_dtype", None, kept, optional=str)
        p.Define("stages", 1, "The stages of a pipeline (GPipe) for training; needs LOOP.")
        p.Define("microbatches", 1, "The parts of a batch that pass through the pipeline.")
        return p

    def __init__(self, params: InstantiableParams, annotator: Any, path: str = "") -> None:
        # The table may have rows for this stack alone, by its path.
        super().__init__(params, annotator.in_stack(path), path)
        p = self.p
        if p.num_layers < 1:
            raise ValueError(f"{self.path}: num_layers must be 1 or more, got {p.num_layers}.")

        if p.moe_every < 1:
            raise ValueError(f"{self.path}: moe_every must be 1 or more, got {p.moe_every}.")

        # A block is the shortest part of the stack that repeats.
        if p.moe is None:
            feed_forwards = [p.dense]
        else:
            feed_forwards = [p.dense] * (p.moe_every - 1) + [p.moe]
        self._block_size = len(feed_forwards)
        self._num_blocks = p.num_layers // self._block_size
        check_pipeline(self.path, p, self._block_size)

        layers = []
        for i in range(p.num_layers):
            feed_forward = feed_forwards[i % self._block_size].Copy()
            layers.append(p.layer.Copy().Set(dim=p.dim, feed_forward=feed_forward))

        if p.layers_as is Layers.UNROLLED:
            self.CreateChildren("layers", layers)
        elif p.num_layers % self._block_size:
            raise ValueError(
                f"{self.path}: LOOP needs whole blocks of {self._block_size} layers, got "
                f"num_layers {p.num_layers}; choose a multiple, or UNROLLED."
            )
        else:
            self.CreateChildren("block", layers[: self._block_size], stacked=self._num_blocks)
        self.CreateChild("norm", p.layer.norm.Copy().Set(dim=p.dim))

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, attended: Attended, context: Context
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        """Applies all layers to x [B, L, M]; see TransformerLayer.FProp.

        Returns [B, L, M], and one report for each layer.
        """
        # The encoded source has a gradient, so it passes through the blocks like x; masks do not.
        shared = [] if attended.encoded is None else [attended.encoded]

        if self.p.layers_as is Layers.UNROLLED:
            x, reports = self._unrolled(theta, Carried(x, shared), attended, context)
        else:
            inputs = Carried(x, shared, NestedMap(layers=theta.block).Flatten())
            if self.p.stages > 1 and context.training:
                pipeline = self._pipeline(theta, attended, context)
                result = pipeline(inputs, self.p.remat)
            else:
                loop = self._loop(theta, attended, context)
                result = loop(inputs, self.p.remat)
            x = result.x
            reports = self._reports_of_stacks(result.reports)

        return self.norm.FProp(theta.norm, x), reports

    def InitCache(
        self, theta: NestedMap, encoded: tf.Tensor, cache_len: int, context: Context
    ) -> NestedMap:
        """Returns empty caches of length P for all layers; see cached_decoding.init_cache."""
        caches = [
            cached_decoding.init_cache(layer, weights, encoded, cache_len, context)
            for layer, weights in self._layers_and_weights(theta)
        ]
        return NestedMap(layers=caches)

    def PromptCache(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        attended: Attended,
        cache_len: int,
        context: Context,
    ) -> NestedMap:
        """Returns caches of prompts x [B, T, M], then of P empty places, for all layers.

        See cached_decoding.prompt_cache.
        """
        caches = []
        for layer, weights in self._layers_and_weights(theta):
            x, cache = cached_decoding.prompt_cache(layer, weights, x, attended, cache_len, context)
            caches.append(cache)
        return NestedMap(layers=caches)

    def GrowCache(self, cache: NestedMap, cache_len: int) -> NestedMap:
        """Returns the caches of all layers padded to length P."""
        # Padding needs no weights, so any layer can do it for the caches of all.
        layers = self.layers if self.p.layers_as is Layers.UNROLLED else self.block
        any_layer = layers[0]
        caches = [
            cached_decoding.grow_cache(any_layer, layer_cache, cache_len)
            for layer_cache in cache.layers
        ]
        return NestedMap(layers=caches)

    def ExtendStep(
        self,
        theta: NestedMap,
        x: tf.Tensor,
        cache: NestedMap,
        attended: Attended,
        first_place: tf.Tensor,
        context: Context,
    ) -> tuple[tf.Tensor, NestedMap, tf.Tensor | None]:
        """Decodes one step of a flat beam, x [B, k, M]; see cached_decoding.extend_step.

        Returns [B, k, M]; the caches with this step's keys and values; and the attention to the
        source, averaged over heads and layers, float32 [B, k, T], or None without a source.
        """
        caches = []
        attentions = []
        layers = self._layers_and_weights(theta)
        for (layer, weights), layer_cache in zip(layers, cache.layers, strict=True):
            x, layer_cache, attention = cached_decoding.extend_step(
                layer, weights, x, layer_cache, attended, first_place, context
            )
            caches.append(layer_cache)
            if attention is not None:
                attentions.append(attention)

        mean_attention = tf.add_n(attentions) / len(attentions) if attentions else None
        return self.norm.FProp(theta.norm, x), NestedMap(layers=caches), mean_attention

    def _unrolled(
        self,
        theta: NestedMap,
        inputs: Carried[tf.Tensor],
        attended: Attended,
        context: Context,
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        """Applies block after block; the last one may have dense layers alone."""
        x = inputs.x
        reports: list[LayerReport] = []
        for index, first in enumerate(range(0, self.p.num_layers, self._block_size)):
            layers = self.layers[first : first + self._block_size]
            weights = NestedMap(layers=theta.layers[first : first + self._block_size])

            block = functools.partial(self._apply, layers, weights, attended, context)
            entered = Carried(x, inputs.shared, weights.Flatten())
            result = apply_block(block, index, entered, self.p.remat, self.p.kept_hidden_dtype)

            x = result.x
            reports += _layer_reports(layers, result.reports)
        return x, reports

    def _loop(self, theta: NestedMap, attended: Attended, context: Context) -> Loop:
        stacks = NestedMap(layers=theta.block)
        return Loop(
            functools.partial(self._apply, self.block, stacks, attended, context),
            self._num_blocks,
            self._annotator,
            Carried(
                "BLM",
                shared=[] if attended.encoded is None else ["BTM"],
                weights=self._weight_dims(stacks),
            ),
            hidden_dtype=self.p.kept_hidden_dtype,
        )

    def _pipeline(self, theta: NestedMap, attended: Attended, context: Context) -> Pipeline:
        # The masks of all microbatches, from which a stage reads those of its own.
        masks = {
            name: microbatches_of(mask, dims, self.p.microbatches, self._annotator)
            for name, dims in _MASK_DIMS.items()
            if (mask := getattr(attended, name)) is not None
        }
        # Layers whose tensors are annotated as a stage's part of those of all stages.
        annotator = self._annotator.over(STACKED)
        layers = [layer.p.Instantiate(annotator, layer.path) for layer in self.block]
        stacks = NestedMap(layers=theta.block)

        def block(
            microbatch: tf.Tensor, index: tf.Tensor, inputs: Carried[tf.Tensor]
        ) -> Carried[tf.Tensor]:
            own_masks = {}
            for name, mask in masks.items():
                own_mask = tf.gather(mask, microbatch)
                own_masks[name] = annotator.annotate(own_mask, _MASK_DIMS[name])
            own_context = context.in_microbatch(microbatch)
            own_attended = Attended(**own_masks)
            return self._apply(layers, stacks, own_attended, own_context, index, computed, inputs)

        return Pipeline(
            block,
            self._num_blocks,
            self.p.stages,
            self.p.microbatches,
            self._annotator,
            self._weight_dims(stacks),
        )

    def _apply(
        self,
        layers: list[TransformerLayer],
        structure: NestedMap,
        attended: Attended,
        context: Context,
        index: int | tf.Tensor,
        products: Products,
        inputs: Carried[tf.Tensor],
    ) -> Carried[tf.Tensor]:
        """Applies the layers of block `index`: a repeat.Block, once the first four are given.

        `structure`.layers is a tree for each layer, in which inputs.weights belong.
        """
        # The source comes from what the blocks share, which has a gradient.
        if inputs.shared:
            (encoded,) = inputs.shared
            attended = dataclasses.replace(attended, encoded=encoded)
        thetas = structure.Pack(inputs.weights).layers

        x = inputs.x
        reports: list[tf.Tensor] = []
        # The random numbers of a layer follow from its index in the whole stack.
        first = index * self._block_size
        for j, (layer, theta) in enumerate(zip(layers, thetas, strict=True)):
            layer_context = context.in_layer(self.path, first + j, layer.path)
            layer_context = dataclasses.replace(layer_context, product=products)
            x, report = layer.FProp(theta, x, attended, layer_context)
            reports += report.tensors()
        return Carried(x, reports=reports)

    def _weight_dims(self, stacks: NestedMap) -> list[str]:
        """Returns the dims of each weight of one block, as they are kept in `stacks`."""
        weight_specs = NestedMap(layers=[layer.weight_specs for layer in self.block])
        specs = stored_weights.specs(weight_specs, stored_weights.numbers_of(stacks))
        return [spec.dims for spec in specs.Flatten()]

    def _reports_of_stacks(self, stacks: Tensors) -> list[LayerReport]:
        """Returns one report for each layer, from all blocks' reports [R, ...]."""
        reports: list[LayerReport] = []
        for i in range(self._num_blocks):
            reports += _layer_reports(self.block, [stack[i] for stack in stacks])
        return reports

    def _layers_and_weights(self, theta: NestedMap) -> list[tuple[TransformerLayer, NestedMap]]:
        """Returns each layer with its weights.

        In a LOOP these are slices of the stacks, or for some of the experts', Items of them.
        """
        if self.p.layers_as is Layers.UNROLLED:
            return list(zip(self.layers, theta.layers, strict=True))

        # Decoding is unrolled in any case: each layer has a cache of its own.
        stacks = NestedMap(layers=theta.block)

        items_stay = [self._item_stays(dims) for dims in self._weight_dims(stacks)]
        layers_and_weights: list[tuple[TransformerLayer, NestedMap]] = []
        for i in range(self._num_blocks):
            items = [Item(stack, i) for stack in stacks.Flatten()]
            weights = [
                item if stays else item.read()
                for item, stays in zip(items, items_stay, strict=True)
            ]
            layers_and_weights += zip(self.block, stacks.Pack(weights).layers, strict=True)
        return layers_and_weights

    def _item_stays(self, dims: str) -> bool:
        """Returns whether a layer's weight of these dims stays in its stack until it is used.

        Experts read theirs one by one, so that a step copies none that no token has chosen. But a
        partition needs an expert whole: where it has a part of each, or of the stack, it gathers
        them before, and then those of one layer are less than those of all.
        """
        factors = zip(STACKED + dims, self._annotator.factor(STACKED + dims), strict=True)
        split = {letter for letter, factor in factors if factor > 1}
        return dims.startswith("E") and split <= {"E"}


def _layer_reports(layers: list[TransformerLayer], tensors: Tensors) -> list[LayerReport]:
    """Rebuilds the layers' reports from all their tensors in order."""
    remaining = iter(tensors)
    return [LayerReport.from_tensors(remaining, layer.routing_fields) for layer in layers]
