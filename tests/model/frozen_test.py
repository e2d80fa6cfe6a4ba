"""Frozen weights do not change; all others are trained as if no weight were frozen."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.base_layer import gaussian
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Mode
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.model import placement
from lingvo_gshard.model.frozen import frozen
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.model import small_task

_SPEC = gaussian((3, 5), "MV", fan_in=3)
_SPECS = NestedMap(
    encoder=NestedMap(layers=[NestedMap(wi=_SPEC), NestedMap(wi=_SPEC)]), softmax=_SPEC
)
# The experts, and the whole encoder.
_PATTERN = r"theta\.(encoder\..*|.*\.feed_forward\.w[io])"


def _frozen_paths(pattern):
    specs = frozen(_SPECS, pattern).FlattenItems()
    return [path for path, spec in specs if spec.is_frozen]


def test_patterns_match_whole_paths():
    assert _frozen_paths(None) == []
    assert _frozen_paths("theta.softmax") == ["softmax"]
    assert _frozen_paths(r"theta\.encoder\.layers\[1\].*") == ["encoder.layers[1].wi"]
    assert frozen(_SPECS, None) is _SPECS


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("softmax", "matches none of the 3 weights; their paths are such as theta.encoder.layers"),
        ("theta.*", "matches all of the 3 weights"),
        ("(", r"train.frozen='\(' is not a regular expression"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        frozen(_SPECS, pattern)


@functools.cache
def _stepped(num_partitions, pattern):
    """The weights before and after a step, the gradients' norms, and the slots' specs."""
    params = small_task.Experiment.params()
    params.train.frozen = pattern

    # Without random numbers, which differ by partitioning.
    params.task.input_dropout.rate = 0.0
    params.task.encoder.moe.group_size = small_task.T
    params.task.decoder.moe.group_size = small_task.L
    for stack in (params.task.encoder, params.task.decoder):
        stack.num_layers = 2
        stack.layer.attention.dropout.rate = 0.0
        stack.layer.residual_dropout.rate = 0.0
        stack.moe.gating.second_expert = SecondExpert.ALL

    parts = placement.partitioning(params, num_partitions)
    model = TaskModel(params, parts)
    programs = Programs(model, in_process=True)
    step = programs.get(Mode.TRAIN, small_task.batch_specs())
    state = small_task.start_state(model)
    before = state.theta.Transform(np.array)
    result = step(state, small_task.random_batch(3).Transform(lambda x: x[None]))
    after = result.state.theta.Transform(np.asarray)
    return before, after, result.metrics.gradient_norms, model.state_spec.slots


def _check(num_partitions):
    """Compares a step with frozen weights to one of all weights, on one device."""
    before, after, norms, slots = _stepped(num_partitions, _PATTERN)
    _, wanted, all_norms, all_slots = _stepped(1, None)
    specs = frozen(
        before.Transform(lambda w: gaussian(w.shape, "_" * w.ndim, fan_in=1, rows=0)), _PATTERN
    )

    leaves = zip(
        specs.FlattenItems(), before.Flatten(), after.Flatten(), wanted.Flatten(), strict=True
    )
    num_frozen = 0
    for (path, spec), old, new, want in leaves:
        if spec.is_frozen:
            num_frozen += 1
            np.testing.assert_array_equal(new, old, err_msg=path)
            assert np.abs(want - old).max() > 0, path
        else:
            np.testing.assert_allclose(new, want, rtol=1e-3, atol=1e-5, err_msg=path)
    assert 10 < num_frozen < len(specs.Flatten())

    # No memory for slots, and no share in the norm.
    paths = [path for path, _ in slots.FlattenItems()]
    assert not [path for path in paths if path.startswith("encoder")]
    assert len(paths) < len(all_slots.FlattenItems())
    assert norms.encoder_0 == 0 < all_norms.encoder_0
    np.testing.assert_allclose(norms.softmax, all_norms.softmax, rtol=1e-5)


@pytest.mark.parametrize("optimizer", [Adafactor, AdamW])
def test_the_optimizer_does_not_change_frozen_weights(optimizer):
    rng = np.random.default_rng(2)
    theta = _SPECS.Transform(lambda w: tf.constant(rng.normal(size=w.shape), tf.float32))
    gradients = _SPECS.Transform(lambda w: tf.constant(rng.normal(size=w.shape), tf.float32))
    results = {}
    for pattern in (None, r"theta\.encoder\..*"):
        specs = frozen(_SPECS, pattern)
        made = optimizer.Params().Instantiate()
        slots = made.slot_specs(specs).Transform(lambda slot: tf.zeros(slot.shape))
        step = tf.constant(0)
        results[pattern], slots = made.update(theta, slots, gradients, step, weight_specs=specs)
        assert [path.split(".")[0] for path, _ in slots.FlattenItems()].count("encoder") == (
            4 if pattern is None else 0
        )

    every, some = results.values()
    np.testing.assert_array_equal(some.softmax, every.softmax)
    for old, new in zip(theta.encoder.Flatten(), some.encoder.Flatten(), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(1, 2, 4), 8])
def test_frozen_weights_stay_and_others_are_trained_as_before(num_partitions):
    _check(num_partitions)
