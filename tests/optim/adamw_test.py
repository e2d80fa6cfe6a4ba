"""AdamW, clipping and the decay's mask, compared with optax.

E experts, M model, H hidden.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf

from lingvo_gshard.core import base_layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.optim.schedules import CosineDecay
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building

_SPECS = NestedMap(
    experts=base_layer.gaussian((4, 8, 6), "EMH", fan_in=8),
    experts_bias=base_layer.constant((4, 1, 6), "E_H", 0.0),
    heads_bias=base_layer.constant((2, 3), "ND", 0.0),
    source_embedding=NestedMap(table=base_layer.gaussian((5, 8), "VM", fan_in=8)),
    stack=[base_layer.constant((8,), "M", 1.0), base_layer.constant((), "", 0.0)],
    zeros=base_layer.constant((8, 6), "MH", 0.0, rows=1),
)
# Biases, scales and embeddings with any dims do not decay.
_DECAYED = NestedMap(
    experts=True,
    experts_bias=False,
    heads_bias=False,
    source_embedding=NestedMap(table=False),
    stack=[False, False],
    zeros=True,
)


def _adamw(**changes):
    p = AdamW.Params().Set(
        beta2=0.95, weight_decay=0.1, epsilon=1e-6, schedule=CosineDecay.Params(), **changes
    )
    p.schedule.Set(peak=0.3, ramp_up_steps=2, total_steps=8, final_share=0.1)
    return p.Instantiate()


def _random(rng, scale=1.0):
    return _SPECS.Transform(lambda s: (scale * rng.standard_normal(s.shape)).astype("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("max_gradient_norm", [None, 0.5])
def test_steps_equal_optax(max_gradient_norm):
    rng = np.random.default_rng(3)
    ours = _adamw(max_gradient_norm=max_gradient_norm)
    theta = _random(rng)
    slots = ours.slot_specs(_SPECS).Transform(lambda s: np.zeros(s.shape, s.dtype))

    # optax counts steps from 0, our schedules from 1.
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.3, 2, 8, 0.03)
    adamw = optax.adamw(
        lambda count: schedule(count + 1),
        b2=0.95,
        eps=1e-6,
        weight_decay=0.1,
        mask=_DECAYED.Flatten(),
    )
    clip = optax.clip_by_global_norm(max_gradient_norm) if max_gradient_norm else optax.identity()
    theirs = optax.chain(clip, adamw)
    want = list(map(jnp.asarray, theta.Flatten()))
    state = theirs.init(want)

    @jax.jit
    def their_step(gradients, state, want):
        updates, state = theirs.update(gradients, state, want)
        return optax.apply_updates(want, updates), state

    for step in range(10):
        gradients = _random(rng, scale=30.0 if step == 3 else 0.1)
        want, state = their_step(gradients.Flatten(), state, want)

        gradients = gradients.Transform(tf.constant)
        clipped = ours.clipped(gradients, tf.linalg.global_norm(gradients.Flatten()))
        theta, slots = ours.update(theta, slots, clipped, tf.constant(step), weight_specs=_SPECS)
        for (path, got), leaf in zip(theta.FlattenItems(), want, strict=True):
            np.testing.assert_allclose(got, leaf, rtol=1e-5, atol=1e-6, err_msg=path)


def test_slots_are_split_by_the_optimizers_letters():
    slots = dict(_adamw().slot_specs(_SPECS).FlattenItems())
    assert slots["experts.m"] == TensorSpec((4, 8, 6), "float32", "emh")
    assert slots["experts.v"] == slots["experts.m"]
    assert slots["stack[1].m"] == TensorSpec((), "float32", "")


@pytest.mark.parametrize("num_partitions", [2, 4, 8])
def test_partitioned_equals_unpartitioned(num_partitions):
    ours = _adamw()
    specs = NestedMap(experts=base_layer.gaussian((8, 4, 6), "EMH", fan_in=4))
    theta = specs.Transform(lambda w: TensorSpec(w.shape, "float32", w.dims))
    slots = ours.slot_specs(specs)

    def fn(state, gradients):
        new = ours.update(state.theta, state.slots, gradients, tf.constant(3), weight_specs=specs)
        return NestedMap(state=NestedMap(theta=new[0], slots=new[1]))

    rng = np.random.default_rng(0)
    state = NestedMap(theta=theta, slots=slots)
    arguments = [
        tree.Transform(lambda s: rng.random(s.shape).astype("float32")) for tree in (state, theta)
    ]

    def computed(n):
        dims = building.dims_of(state=state)
        return building.compile_fn(fn, n, dims, state=state, gradients=theta)(*arguments)

    building.assert_close(computed(num_partitions), computed(1), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("beta1", 1.0, r"in \[0, 1\), got 1.0"),
        ("beta2", -0.1, r"in \[0, 1\), got -0.1"),
        ("epsilon", 0.0, "above 0, got 0.0"),
        ("weight_decay", -0.1, "0 or more, got -0.1"),
        ("max_gradient_norm", 0.0, "above 0, got 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, expected):
    with pytest.raises(ValueError, match=f"AdamW: {name} must be {expected}"):
        AdamW.Params().Set(**{name: value}).Instantiate()


def test_an_invalid_pattern_is_refused():
    with pytest.raises(
        ValueError, match=r"AdamW: undecayed, '\(', is not a regular expression: missing \)"
    ):
        AdamW.Params().Set(undecayed="(").Instantiate()
