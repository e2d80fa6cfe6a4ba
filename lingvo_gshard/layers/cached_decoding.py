"""A Transformer layer of the decoder, one step of a flat beam at a time (section A.1).

A flat beam writes the k hypotheses of a sentence into one sequence, in turns, so step t has the
places t * k to t * k + k - 1. Each hypothesis attends to its own places by a mask, and no cache is
ever reordered. A layer's cache is a NestedMap of

    self_keys      [B, N, P, D]  of all places so far; zeros at those to come
    self_values    [B, N, P, D]
    source_keys    [B, N, T, D]  of the encoded source, which stay the same
    source_values  [B, N, T, D]

in the layout of their products, since any other would be transposed in full at every step. A layer
without a source has neither source keys nor source values. Its cache may begin with the places of a
prompt, which all hypotheses share.

B batch, T source length, M model, N heads, D head size, k beam size, P cache length: the places
that the cache has room for.
"""

from __future__ import annotations

from lingvo_gshard.core.late import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.layers.attention import KeysValues
from lingvo_gshard.layers.context import Context
from lingvo_gshard.layers.slices import lengthened, write_at
from lingvo_gshard.layers.transformer import Attended, TransformerLayer


def init_cache(
    layer: TransformerLayer,
    theta: NestedMap,
    encoded: tf.Tensor,
    cache_len: int,
    context: Context,
) -> NestedMap:
    """Returns an empty cache of length P, with the keys and values of `encoded` [B, T, M]."""
    source = layer.source_attention.Project(theta.source_attention, encoded, context)

    # The places of the flat beam, as many as are decoded before the cache grows.
    batch, heads, _, head_dim = source.keys.shape
    dtype = source.keys.dtype
    empty = tf.zeros([batch, heads, cache_len, head_dim], dtype)
    return NestedMap(
        _self_cache(layer, empty, empty),
        source_keys=source.keys,
        source_values=source.values,
    )


def prompt_cache(
    layer: TransformerLayer,
    theta: NestedMap,
    x: tf.Tensor,
    attended: Attended,
    cache_len: int,
    context: Context,
) -> tuple[tf.Tensor, NestedMap]:
    """Applies a layer without a source to prompts x [B, T, M], as its FProp does.

    Returns [B, T, M], and a cache of T places with the prompts' keys and values, then P empty ones.
    """
    # FProp projects them as well; the compiler merges both.
    h = layer.self_norm.FProp(theta.self_norm, x)
    prompt = layer.self_attention.Project(theta.self_attention, h, context, attended.positions)
    x, _ = layer.FProp(theta, x, attended, context)

    cache = NestedMap(self_keys=prompt.keys, self_values=prompt.values)
    return x, grow_cache(layer, cache, x.shape[1] + cache_len)


def grow_cache(layer: TransformerLayer, cache: NestedMap, cache_len: int) -> NestedMap:
    """Returns the cache padded to length P."""
    keys = lengthened(cache.self_keys, cache_len, axis=2)
    values = lengthened(cache.self_values, cache_len, axis=2)
    return NestedMap(cache, **_self_cache(layer, keys, values))


def extend_step(
    layer: TransformerLayer,
    theta: NestedMap,
    x: tf.Tensor,
    cache: NestedMap,
    attended: Attended,
    first_place: tf.Tensor,
    context: Context,
) -> tuple[tf.Tensor, NestedMap, tf.Tensor | None]:
    """Decodes one step: appends k places to the cache and attends to them and those before.

    Args:
      layer: A decoder's layer.
      theta: Its weights.
      x: The newest token of every hypothesis, [B, k, M].
      cache: See the head of this file.
      attended: The mask [B, k, P] is 1 at the places of each hypothesis, including this step's.
        `encoded` is not read; the cache has its keys and values.
      first_place: The first of this step's k places, an int32 scalar.
      context: As for FProp.

    Returns:
      [B, k, M]; the cache with this step's keys and values; and the attention to the source,
      averaged over the heads, float32 [B, k, T], or None for a layer without a source.
    """
    # Self-attention to the places so far, which include this step's.
    h = layer.self_norm.FProp(theta.self_norm, x)
    new = layer.self_attention.Project(theta.self_attention, h, context, attended.positions)
    cache = _with_places(layer, cache, new, first_place)
    memory = KeysValues(cache.self_keys, cache.self_values, attended.key_positions)
    h = layer.self_attention.FProp(
        theta.self_attention, h, memory, attended.mask, context, attended.positions
    )
    h = layer.self_dropout.FProp(theta.self_dropout, h, "BLM", context)
    x = layer.annotate(x + h, "BLM")

    # Source attention. Both calls compute the probabilities; the compiler merges them.
    attention: tf.Tensor | None = None
    if layer.p.has_source:
        h = layer.source_norm.FProp(theta.source_norm, x)
        memory = KeysValues(cache.source_keys, cache.source_values)
        weights = layer.source_attention.Weights(
            theta.source_attention, h, memory, attended.source_mask, context
        )
        attention = tf.reduce_mean(weights, 1)
        h = layer.source_attention.FProp(
            theta.source_attention, h, memory, attended.source_mask, context
        )
        h = layer.source_dropout.FProp(theta.source_dropout, h, "BLM", context)
        x = layer.annotate(x + h, "BLM")

    # Feed-forward, or experts, which a hypothesis that is absent does not take.
    x, _ = layer.FeedForward(theta, x, attended.valid_mask, context)
    return x, cache, attention


def _with_places(
    layer: TransformerLayer, cache: NestedMap, new: KeysValues, first: tf.Tensor
) -> NestedMap:
    """Returns the cache with new keys and values [B, N, k, D], written from place `first` on."""
    keys = write_at(cache.self_keys, new.keys, first, axis=2)
    values = write_at(cache.self_values, new.values, first, axis=2)
    # Held, since the compiler would write such tensors, which are both read and kept, twice: once
    # into a copy.
    keys, values = xla.optimization_barrier(keys, values)
    return NestedMap(cache, **_self_cache(layer, keys, values))


def _self_cache(layer: TransformerLayer, keys: tf.Tensor, values: tf.Tensor) -> NestedMap:
    return NestedMap(
        self_keys=layer.annotate(keys, "BNTD"),
        self_values=layer.annotate(values, "BNTD"),
    )
