"""Decoding with caches, step by step, against whole sequences; k hypotheses in one flat beam.

B batch, L length, M model, k beam, P cache length.
"""

import functools
import math
import re

import jax
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import cached_decoding
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.numerics import Numerics
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.transformer import Attended
from lingvo_gshard.layers.weight import Weight
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from tests.layers import building, small_stack, stacking
from tests.layers.small_stack import B, L, M, T
from tests.spmd import functions
from xla_spmd.mesh import Mesh

_K = 2
_PREDICT = Context(Mode.PREDICT)


def _attended(mask):
    """The attended places of the beam's newest tokens, given the mask [B, k, P]."""
    return Attended(mask, tf.ones([B, _K]), tf.ones([B, _K, T]))


def test_steps_equal_whole_sequences_also_when_the_cache_grows():
    """Hypothesis h is fed its own sequence, and attends to its own positions t * k + h."""
    [layer] = small_stack.stack(num_layers=1, has_source=True).layers
    theta = building.random_theta(layer).Transform(tf.constant)
    encoded = small_stack.encoded_BTM()
    sequences = [small_stack.x_BLM(), small_stack.x_BLM()[:, ::-1]]

    want = [
        layer.FProp(theta, x, small_stack.attended(encoded), Context(Mode.EVAL))[0]
        for x in sequences
    ]

    @tf.function(jit_compile=True, autograph=False)
    def step(x, cache, mask, index):
        first_place = index * mask.shape[1]
        return cached_decoding.extend_step(
            layer, theta, x, cache, _attended(mask), first_place, _PREDICT
        )

    half = L // 2 * _K
    cache = cached_decoding.init_cache(layer, theta, encoded, half, _PREDICT)
    for t in range(L):
        if t * _K == half:
            cache = cached_decoding.grow_cache(layer, cache, L * _K)
        cache_len = cache.self_values.shape[2]
        mask = np.zeros((B, _K, cache_len), np.float32)
        for h in range(_K):
            mask[:, h, h : t * _K + h + 1 : _K] = 1

        x = tf.stack([sequence[:, t] for sequence in sequences], 1)
        y, cache, attention = step(x, cache, tf.constant(mask), tf.constant(t))

        for h in range(_K):
            np.testing.assert_allclose(y[:, h], want[h][:, t], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(tf.reduce_sum(attention, -1), np.ones((B, _K)), rtol=1e-5)


@pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="What XLA copies was looked at in JAX 0.12 alone."
)
def test_a_step_of_one_row_copies_neither_caches_nor_weights():
    """Both are read in place, and new places are written into the cache itself."""
    [layer] = small_stack.stack(num_layers=1, has_source=True, has_experts=False).layers
    context = Context(Mode.PREDICT, numerics=Numerics(is_decoding=True))
    cache_len = 256

    def decode(theta, inputs):
        cache = cached_decoding.init_cache(layer, theta, inputs.encoded, cache_len, context)

        def step(index, x, *leaves):
            mask = tf.cast(tf.range(cache_len) <= index, tf.float32)[None, None]
            attended = Attended(mask, tf.ones([1, 1]), tf.ones([1, 1, T]))
            x, new, _ = cached_decoding.extend_step(
                layer, theta, x, cache.Pack(leaves), attended, index, context
            )
            return [index + 1, x, *new.Flatten()]

        start = [tf.constant(0), inputs.x, *cache.Flatten()]
        return NestedMap(x=tf.while_loop(lambda index, *_: index < cache_len, step, start)[1])

    inputs = NestedMap(
        encoded=TensorSpec((1, T, M), "float32", "BTM"), x=TensorSpec((1, 1, M), "float32", "BLM")
    )
    run = building.compile_fn(
        decode, 1, {"x": "BLM"}, theta=building.theta_specs(layer), inputs=inputs
    )

    # All but the program's entry, where the first cache may be a copy of another empty one.
    others, _ = run.compiled.as_text().split("\nENTRY")
    copied = re.findall(r" = f32\[([\d,]+)\]\S* (?:copy|transpose)\(", others)
    sizes = {math.prod(map(int, shape.split(","))) for shape in copied}
    attention = layer.p.attention
    cache_size = attention.num_heads * cache_len * attention.head_dim
    weight_size = layer.p.feed_forward.hidden_dim * M
    assert sizes.isdisjoint({cache_size, weight_size})


@pytest.mark.slow
def test_decoding_with_stacked_weights_equals_unrolled():
    cache_len = 6
    unrolled = small_stack.stack(has_source=True)
    loop = small_stack.stack(has_source=True, layers_as=Layers.LOOP)
    theta = building.random_theta(unrolled)
    stacks = stacking.stacked(theta, 2)

    # All results of one step, and the grown caches.
    def one_step(stack, weights, x):
        weights = weights.Transform(tf.constant)
        encoded = small_stack.encoded_BTM()
        cache = stack.InitCache(weights, encoded, cache_len, _PREDICT)

        mask = tf.ones([B, _K, cache_len])
        y, cache, attention = stack.ExtendStep(
            weights, x, cache, _attended(mask), tf.constant(_K), _PREDICT
        )
        return [y, attention, *stack.GrowCache(cache, 2 * cache_len).Flatten()]

    x = small_stack.x_BLM()[:, :_K]
    compiled = functools.partial(one_step, loop, stacks)
    got = tf.function(compiled, jit_compile=True, autograph=False)(x)
    want = one_step(unrolled, theta, x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _first_step(stack, theta, inputs):
    """Returns the output of a beam's first step for `inputs.x`."""
    cache = stack.InitCache(theta, inputs.encoded, _K, _PREDICT)
    attended = _attended(tf.ones([B, _K, _K]))
    x, *_ = stack.ExtendStep(theta, inputs.x, cache, attended, tf.constant(0), _PREDICT)
    return NestedMap(x=x)


@pytest.mark.slow
def test_a_step_reads_experts_in_their_stack():
    """No result has the shape of all experts of a layer, [3, 8, 5]: experts are not copied."""
    loop = small_stack.stack(has_source=True, layers_as=Layers.LOOP)
    theta = building.random_theta(loop)

    @tf.function(jit_compile=True, autograph=False)
    def step(*weights):
        inputs = NestedMap(encoded=small_stack.encoded_BTM(), x=small_stack.x_BLM()[:, :_K])
        return _first_step(loop, theta.Pack(weights), inputs).x

    read_hlo = step.experimental_get_compiler_ir(*theta.Transform(tf.constant).Flatten())
    hlo = read_hlo(stage="optimized_hlo")
    assert "f32[2,3,8,5]" in hlo
    assert "f32[3,8,5]" not in hlo


@pytest.mark.slow
def test_a_partition_reads_its_own_experts_in_their_stack():
    """No result has the shape of a partition's experts of a layer, [2, 8, 5], or of their parts."""
    settings = small_stack.params(has_source=True, layers_as=Layers.LOOP)
    settings.moe.num_experts = 4
    parts = functions.partitioning(2)
    loop = settings.Instantiate(Annotator(parts), "stack")

    inputs = NestedMap(
        encoded=TensorSpec((B, T, M), "float32", "BTM"), x=TensorSpec((B, _K, M), "float32", "BLM")
    )
    run = building.compile_fn(
        functools.partial(_first_step, loop),
        parts,
        {"x": "BLM"},
        theta=building.theta_specs(loop),
        inputs=inputs,
    )
    hlo = run.compiled.as_text()
    assert "f32[2,2,8,5]" in hlo
    assert "f32[2,8,5]" not in hlo and "f32[1,2,8,5]" not in hlo

    # As on one partition.
    unsplit = settings.Instantiate(building.Unannotated(), "stack")
    theta = building.random_theta(unsplit)
    values = NestedMap(encoded=small_stack.encoded_BTM(), x=small_stack.x_BLM()[:, :_K])
    want = tf.function(
        lambda: _first_step(unsplit, theta.Transform(tf.constant), values).x, jit_compile=True
    )()
    got = run(theta, values.Transform(np.asarray)).x
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_only_experts_that_are_whole_on_a_partition_stay_in_their_stack():
    mesh = Mesh(("x", "y"), (2, 2))

    def unread(table):
        parts = Partitioning.parse(mesh, table)
        settings = small_stack.params(has_source=True, layers_as=Layers.LOOP)
        loop = settings.Instantiate(Annotator(parts), "stack")
        weights = building.random_theta(loop).Transform(tf.constant)
        (_, _), (_, experts), *_ = loop._layers_and_weights(weights)
        items = experts.FlattenItems()
        return [path for path, leaf in items if isinstance(leaf, Weight)]

    assert unread("BG:x+y,E:x") == ["feed_forward.wi", "feed_forward.wo"]
    assert unread("BG:x,E:x,H:y") == []
