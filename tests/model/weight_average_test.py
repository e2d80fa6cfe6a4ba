"""The moving average of weights against optax's, in the model, its checkpoints and its exports."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement, weight_average
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building
from tests.model import small_task


# optax divides by 1 - d^t, which has few digits where d is close to 1.
@pytest.mark.parametrize(
    ("decay", "rtol"), [(0.0, 1e-6), (0.5, 1e-6), (0.999, 1e-4), (0.99999, 0.02)]
)
def test_averages_equal_optax_without_its_bias(decay, rtol):
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal((3, 2)).astype("float32") for _ in range(30)]
    theirs = optax.ema(decay, debias=True)
    state = theirs.init(jnp.zeros((3, 2)))
    ours = NestedMap(w=tf.constant(rng.standard_normal((3, 2)), tf.float32))  # Any values.

    for step, w in enumerate(weights):
        want, state = theirs.update(jnp.asarray(w), state)
        theta = NestedMap(w=tf.constant(w))
        ours = weight_average.averaged(ours, theta, tf.constant(step), decay)
        np.testing.assert_allclose(ours.w, want, rtol=rtol, atol=1e-6)

    exact = np.average(np.array(weights, np.float64), 0, [decay**i for i in range(29, -1, -1)])
    np.testing.assert_allclose(ours.w, exact, rtol=1e-4, atol=1e-6)


def _model(num_partitions, *settings):
    params = small_task.Experiment.params()
    params.task.decoder.moe.group_size = small_task.L
    params.task.encoder.num_layers = 1
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    parts = placement.partitioning(params, num_partitions)
    model = TaskModel(params, parts)
    return model, Programs(model, in_process=True)


def test_averages_are_split_as_slots_are():
    model, _ = _model(4, "train.ema_decay=0.9", "optimizer.schedule.multiplier=0.1")
    specs = dict(model.state_spec.FlattenItems())
    assert specs["ema.decoder.layers[1].feed_forward.wi"].dims == "emh"
    assert "ema" not in _model(4)[0].state_spec


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(1), 4])
def test_a_model_keeps_and_evaluates_averages(num_partitions):
    settings = ("sharding=BGE:d,mhnv:d",)
    _, programs = _model(num_partitions, *settings, "train.ema_decay=0.9")
    _, plain = _model(num_partitions, *settings)
    state = programs.initialize(7)
    building.assert_close(state.ema, state.theta, rtol=0, atol=0)
    without = NestedMap(step=state.step, theta=state.theta, slots=state.slots)
    without = without.Transform(np.asarray)  # A step donates its state.

    theirs = optax.ema(0.9, debias=True)
    average = theirs.init(state.theta.Transform(np.asarray).Flatten())
    step = programs.get(Mode.TRAIN, small_task.batch_specs())
    step_without = plain.get(Mode.TRAIN, small_task.batch_specs())
    for seed in range(3):
        batch = small_task.random_batch(seed).Transform(lambda x: x[None])
        state = step(state, batch).state
        without = step_without(without, batch).state
        theta = state.theta.Transform(np.asarray)
        want, average = theirs.update(theta.Flatten(), average)
    building.assert_close(theta, without.theta, rtol=1e-6, atol=1e-7)  # Training is unchanged.
    building.assert_close(state.ema, theta.Pack(want), rtol=1e-4)

    # Evaluation uses the averages.
    batch = small_task.random_batch(9)
    evaluate = programs.get(Mode.EVAL, small_task.batch_specs())
    evaluate_plain = plain.get(Mode.EVAL, small_task.batch_specs())
    got = evaluate(state, batch)
    averages = NestedMap(step=state.step, theta=state.ema, slots=state.slots)
    want = evaluate_plain(averages.Transform(np.asarray), batch)
    building.assert_close(got, want, rtol=1e-5)
    raw = evaluate_plain(without, batch)
    assert abs(float(np.asarray(raw.sums.nll)) - float(np.asarray(got.sums.nll))) > 1e-3


@pytest.mark.slow
def test_a_skipped_step_leaves_the_averages():
    settings = ("train.ema_decay=0.9", "task.decoder.num_layers=1", "sharding=BGE:d,mhnv:d")
    _, programs = _model(2, *settings)
    step = programs.get(Mode.TRAIN, small_task.batch_specs())
    batch = small_task.random_batch(0).Transform(lambda x: x[None])
    broken = batch.Transform(np.copy)
    broken.labels.target_weights[0, 0, 0] = np.nan

    before = step(programs.initialize(7), batch).state.Transform(np.asarray)
    skipped = step(before, broken)
    assert skipped.metrics.skipped == 1.0
    after = skipped.state.Transform(np.asarray)
    building.assert_close(after.ema, before.ema, rtol=0, atol=0)

    # The next one moves them, as optax.incremental_update with the rate of step 3.
    moved = step(after, batch).state.Transform(np.asarray)
    rate = 0.1 / (1 - 0.9**3)
    want = optax.incremental_update(moved.theta.Flatten(), before.ema.Flatten(), step_size=rate)
    building.assert_close(moved.ema, moved.ema.Pack(want), rtol=1e-5)
