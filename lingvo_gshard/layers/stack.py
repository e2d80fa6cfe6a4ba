"""A stack of Transformer layers, of which every other or n-th one may have experts (section 2.1).

The program applies its layers in one of three ways, with the same results: unrolled, each with its
own instructions; as a loop over blocks (repeat.py); or, for training, as a pipeline of stages
(pipeline.py). A block is a dense layer alone or, with experts, as many layers as `moe_every`, of
which the last one has them. In any other order of layers it is the shortest part that repeats, and
layers before the first block are unrolled (layer_order.py).

B batch, L length (of the target in a decoder), T source length, M model, k beam size, P cache
length; R blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.base_layer import STACKED, BaseLayer
from lingvo_gshard.core.hyperparams import REQUIRED, AnyParams, InstantiableParams, setting
from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import cached_decoding, stored_weights
from lingvo_gshard.layers.context import Context, LayerReport
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.layer_order import layer_order
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.norms import LayerNorm, RMSNorm
from lingvo_gshard.layers.numerics import Numerics, Remat
from lingvo_gshard.layers.pipeline import Pipeline, microbatches_of
from lingvo_gshard.layers.repeat import Block, Carried, Layers, Loop, Tensors, unrolled
from lingvo_gshard.layers.transformer import Attended, TransformerLayer
from lingvo_gshard.layers.weight import weights_of_layer

# The dims of the fields of Attended that have something for each token: masks and positions.
_MASK_DIMS = {
    "mask": "BL_",
    "valid_mask": "BL",
    "source_mask": "BL_",
    "positions": "BL",
    "first_pieces": "BL",
}


@dataclasses.dataclass(frozen=True)
class _LayersOfBlock:
    """The layers of a block, as a repeat.Block by the number of the first layer."""

    stack: str  # The path of their stack.
    layers: Sequence[TransformerLayer]
    weights: NestedMap  # `layers` has a tree for each layer, in whose places inputs.weights belong.
    attended: Attended
    context: Context
    # The layers' reports as they were last traced, since gatings differ in the fields that they
    # report. A copy of this object for a stage appends to the same list.
    _traced: list[LayerReport] = dataclasses.field(default_factory=list)

    def __call__(
        self, first: int | tf.Tensor, numerics: Numerics, inputs: Carried[tf.Tensor]
    ) -> Carried[tf.Tensor]:
        """Applies the layers to x; the reports are all tensors of the layers' reports in order."""
        # The source is among the shared tensors, which have gradients.
        attended = self.attended
        if inputs.shared:
            (encoded,) = inputs.shared
            attended = dataclasses.replace(attended, encoded=encoded)
        thetas = self.weights.Pack(inputs.weights).layers

        x = inputs.x
        reports: list[tf.Tensor] = []
        self._traced.clear()
        # The random numbers of a layer follow from its index in the whole stack.
        for j, (layer, theta) in enumerate(zip(self.layers, thetas, strict=True)):
            context = self.context.in_layer(self.stack, first + j, layer.path)
            context = dataclasses.replace(context, numerics=numerics)
            x, report = layer.FProp(theta, x, attended, context)
            reports += report.tensors()
            self._traced.append(report)
        return Carried(x, reports=reports)

    def reports(self, tensors: Tensors) -> list[LayerReport]:
        """Rebuilds the layers' reports from the tensors of a call that has been traced."""
        remaining = iter(tensors)
        return [report.with_tensors(remaining) for report in self._traced]


class TransformerStack(BaseLayer):
    """Layers and a final norm."""

    layers: list[TransformerLayer]  # UNROLLED: all layers. LOOP: those before the first block.
    block: list[TransformerLayer]  # LOOP: the layers of one block; theta.block[j] holds stacks.
    norm: LayerNorm | RMSNorm

    class Params(BaseLayer.Params):
        dim: int = setting(REQUIRED, "M, the model dimension.")
        num_layers: int = setting(REQUIRED, "The number of layers, counted as in the paper.")
        layer: TransformerLayer.Params = setting(
            TransformerLayer.Params(), "All layers, except their feed_forward."
        )
        # Any layer with a dim and this FProp may take its place.
        dense: AnyParams = setting(
            FeedForwardLayer.Params(), "The feed-forward of layers without experts."
        )
        moe: MoELayer.Params | None = setting(
            MoELayer.Params(), "The feed-forward of every n-th layer; None if all are dense."
        )
        moe_every: int = setting(2, "n: layers n - 1, 2n - 1, ..., counted from 0, have experts.")
        moe_layers: tuple[int, ...] | None = setting(
            None, "The layers with experts, counted from 0: (1, 2, 5), say; None by moe_every."
        )
        layers_as: Layers = setting(Layers.UNROLLED, "How the program applies the layers.")
        remat: Remat = setting(
            Remat.NONE, "What the backward pass recomputes; AUTO, the least that fits the memory."
        )
        kept_hidden_dtype: str | None = setting(
            None, "The dtype in which remat keeps what is inside a layer; None for its own."
        )
        stages: int = setting(1, "The stages of a pipeline (GPipe) for training; needs LOOP.")
        microbatches: int = setting(1, "The parts of a batch that pass through the pipeline.")

    p: Params

    def __init__(self, params: Params, annotator: Any, path: str = "") -> None:
        # The table may have rows for this stack alone, by its path.
        super().__init__(params, annotator.in_stack(path), path)
        p = self.p
        if p.remat is Remat.AUTO:
            names = ", ".join(remat.name for remat in Remat.order())
            raise ValueError(
                f"{self.path}: remat=AUTO is replaced only where a run or a plan begins; expected "
                f"one of {names} here."
            )
        self._order = order = layer_order(p, self.path)
        _check_pipeline(self.path, p, order.num_blocks)

        layers = []
        for has_experts in order.have_experts:
            feed_forward: InstantiableParams = p.dense
            if has_experts:
                assert p.moe is not None, self.path
                feed_forward = p.moe
            layers.append(p.layer.Copy().Set(dim=p.dim, feed_forward=feed_forward.Copy()))

        if p.layers_as is Layers.UNROLLED:
            self.CreateChildren("layers", layers)
        elif not order.is_whole:
            raise ValueError(
                f"{self.path}: LOOP needs whole blocks of {order.block_size} layers, got "
                f"num_layers {p.num_layers}; choose a multiple, or UNROLLED."
            )
        else:
            # Without layers before the blocks, theta has no list of them.
            first = layers[: order.num_first]
            if first:
                self.CreateChildren("layers", first)
            else:
                self.layers = []
            block = layers[order.num_first :][: order.block_size]
            self.CreateChildren("block", block, stacked=order.num_blocks)
        self.CreateChild("norm", p.layer.norm.Copy().Set(dim=p.dim))

    def FProp(
        self, theta: NestedMap, x: tf.Tensor, attended: Attended, context: Context
    ) -> tuple[tf.Tensor, list[LayerReport]]:
        """Applies all layers to x [B, L, M]; see TransformerLayer.FProp.

        Returns [B, L, M], and one report for each layer. Raises ValueError in a microbatch whose
        context was not `counted`.
        """
        if context.whole is not None and self.path not in context.stack_tokens:
            raise ValueError(
                f"train.gradient_accumulation_steps: the task gives no tokens of the {self.path}, "
                "over which its layers take means; see Context.counted."
            )

        # The stack's settings decide what its blocks keep for their gradients.
        numerics = dataclasses.replace(
            context.numerics, remat=self.p.remat, hidden_dtype=self.p.kept_hidden_dtype
        )
        context = dataclasses.replace(context, numerics=numerics)

        # The encoded source has a gradient, so it passes through the blocks like x; masks do not.
        shared = [] if attended.encoded is None else [attended.encoded]

        # All layers, or those before the first block. The last block may have dense layers alone.
        reports: list[LayerReport] = []
        for part in self._order.parts():
            if part.start >= len(self.layers):
                break
            weights = NestedMap(layers=[theta.layers[i] for i in part])
            layers = [self.layers[i] for i in part]
            block = _LayersOfBlock(self.path, layers, weights, attended, context)
            apply = unrolled(block, part.start, context.numerics)
            result = apply(Carried(x, shared, weights.Flatten()))
            x = result.x
            reports += block.reports(result.reports)

        if self.p.layers_as is Layers.LOOP:
            stacks = NestedMap(layers=theta.block)
            block = _LayersOfBlock(self.path, self.block, stacks, attended, context)
            inputs = Carried(x, shared, stacks.Flatten())
            if self.p.stages > 1 and context.training:
                result = self._pipeline(block)(inputs)
            else:
                result = self._loop(block)(inputs)
            x = result.x
            for i in range(self._order.num_blocks):
                reports += block.reports([stack[i] for stack in result.reports])

        return self.norm.FProp(theta.norm, x), reports

    @property
    def traced_layers(self) -> list[TransformerLayer]:
        """All layers, or in a LOOP the first ones and the layers of one block."""
        return self.layers if self.p.layers_as is Layers.UNROLLED else self.layers + self.block

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
        # Weights play no part, so any layer can pad the caches of all.
        any_layer, *_ = self.traced_layers
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

    def _loop(self, block: _LayersOfBlock) -> Loop:
        return Loop(
            self._in_loop(block),
            self._order.num_blocks,
            self._annotator,
            Carried(
                "BLM",
                shared=[] if block.attended.encoded is None else ["BTM"],
                weights=self._weight_dims(block.weights),
            ),
            [spec.is_matrix for spec in self._weights_of_block().Flatten()],
            block.context.numerics,
        )

    def _pipeline(self, block: _LayersOfBlock) -> Pipeline:
        attended = block.attended

        # The masks of all microbatches: a stage reads its own microbatch's.
        masks = {
            name: microbatches_of(mask, dims, self.p.microbatches, self._annotator)
            for name, dims in _MASK_DIMS.items()
            if (mask := getattr(attended, name)) is not None
        }
        # Layers that annotate their tensors as one stage's part of all stages' tensors.
        annotator = self._annotator.over(STACKED)
        layers = [layer.p.Instantiate(annotator, layer.path) for layer in self.block]
        context = block.context.divided(self.path, attended.valid_mask, self.p.microbatches)

        def stage_block(
            microbatch: tf.Tensor,
            index: tf.Tensor,
            numerics: Numerics,
            inputs: Carried[tf.Tensor],
        ) -> Carried[tf.Tensor]:
            own_masks = {}
            for name, mask in masks.items():
                own_mask = tf.gather(mask, microbatch)
                own_masks[name] = annotator.annotate(own_mask, _MASK_DIMS[name])
            own_block = dataclasses.replace(
                block,
                layers=layers,
                attended=dataclasses.replace(attended, encoded=None, **own_masks),
                context=context.in_microbatch(microbatch),
            )
            return self._in_loop(own_block)(index, numerics, inputs)

        return Pipeline(
            stage_block,
            self._order.num_blocks,
            self.p.stages,
            self.p.microbatches,
            self._annotator,
            self._weight_dims(block.weights),
            context.numerics,
        )

    def _in_loop(self, apply: Block) -> Block:
        """Returns a repeat.Block by a block's index, given one by its first layer's number."""

        def block(
            index: int | tf.Tensor, numerics: Numerics, inputs: Carried[tf.Tensor]
        ) -> Carried[tf.Tensor]:
            order = self._order
            return apply(order.num_first + index * order.block_size, numerics, inputs)

        return block

    def _weight_dims(self, stacks: NestedMap) -> list[str]:
        """Returns the dims of each weight of one block, as they are kept in `stacks`."""
        numbers = stored_weights.numbers_of(stacks)
        specs = stored_weights.specs(self._weights_of_block(), numbers)
        return [spec.dims for spec in specs.Flatten()]

    def _weights_of_block(self) -> NestedMap:
        """Returns the WeightSpecs of one block."""
        return NestedMap(layers=[layer.weight_specs for layer in self.block])

    def _layers_and_weights(self, theta: NestedMap) -> list[tuple[TransformerLayer, NestedMap]]:
        """Returns each layer with its weights.

        In a LOOP these are elements of the stacks, which are read unless they stay.
        """
        layers_and_weights = list(zip(self.layers, theta.get("layers", []), strict=True))
        if self.p.layers_as is Layers.UNROLLED:
            return layers_and_weights

        # Decoding is unrolled in any case: each layer has its own cache.
        stacks = NestedMap(layers=theta.block)

        stay = self._weights_of_block().Transform(lambda spec: self._stays(spec.dims))
        for i in range(self._order.num_blocks):
            weights = weights_of_layer(stacks, i, stay)
            layers_and_weights += zip(self.block, weights.layers, strict=True)
        return layers_and_weights

    def _stays(self, dims: str) -> bool:
        """Returns whether a layer's weight of these dims stays in its stack until it is used.

        Experts' weights are read one by one, so that a step copies only chosen ones. But a
        partition needs an expert whole: where it has a part of each, or of the stack, it gathers
        them first, and one layer's weights are fewer than all layers'.
        """
        factors = zip(STACKED + dims, self._annotator.factor(STACKED + dims), strict=True)
        split = {letter for letter, factor in factors if factor > 1}
        return dims.startswith("E") and split <= {"E"}


def _check_pipeline(name: str, p: TransformerStack.Params, num_blocks: int) -> None:
    """Raises ValueError if the stack called `name` can't have its stages or microbatches."""
    if p.stages < 1 or p.microbatches < 1 or p.stages == 1 < p.microbatches:
        raise ValueError(
            f"{name}: stages={p.stages} and microbatches={p.microbatches}: both must be 1 or "
            "more, and microbatches need 2 stages or more."
        )
    if p.stages == 1:
        return

    requirements = {
        "layers_as=LOOP": p.layers_as is Layers.LOOP,
        "remat=BLOCK": p.remat is Remat.BLOCK,
        "moe.dispatch=EINSUM": p.moe is None or p.moe.dispatch is Dispatch.EINSUM,
        f"a number of stages that divides its {num_blocks} blocks": num_blocks % p.stages == 0,
    }
    for requirement, is_met in requirements.items():
        if not is_met:
            raise ValueError(f"{name}: a pipeline of stages={p.stages} needs {requirement}.")
