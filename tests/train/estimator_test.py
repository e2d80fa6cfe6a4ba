"""Train, evaluate, predict: resumed equals uninterrupted, K steps per call equal one."""

import dataclasses
import itertools
import json
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lingvo_gshard.checkpoints import exported
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.checkpoints.saved_steps import whole_steps
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.spmd import specs
from lingvo_gshard.train import config
from lingvo_gshard.train.hooks import NonFinite, NonFiniteLossError, TrainHook
from tests.train import regression
from tests.train.regression import B, H, V


class _Recorder(TrainHook):
    def __init__(self):
        self.losses, self.calls, self.saved, self.began, self.ended = [], [], [], [], 0

    def begin(self, step):
        self.began.append(step)

    def after_call(self, call):
        self.calls.append(call)
        self.losses += call.metrics.loss.tolist()

    def after_save(self, step, state):
        self.saved.append(step)

    def end(self):
        self.ended += 1


def _train(model_dir, max_steps, **options):
    recorder = _Recorder()
    estimator = regression.make(model_dir, **options)
    estimator.train(lambda p: regression.Batches(), max_steps=max_steps, hooks=[recorder])
    return recorder


def _state(model_dir, num_partitions=1):
    """Returns the latest checkpoint: step, {path: array}, input state."""
    parts = regression.make(model_dir, num_partitions).partitioning
    with Checkpoints(model_dir) as saved:
        shardings = specs.shardings(parts, regression.STATE, specs.device_mesh(parts))
        restored = saved.restore(saved.latest(), regression.STATE, shardings)
    arrays = {path: np.asarray(x) for path, x in restored.state.FlattenItems()}
    return restored.step, arrays, restored.input_state


def _numpy_losses(w_HV, num_steps):
    """The same training, written out in NumPy."""
    bias_V = np.zeros(V, np.float32)
    m_w, m_b, losses = np.zeros_like(w_HV), np.zeros_like(bias_V), []
    for i in range(num_steps):
        batch = regression.Batches().batch(i)
        error = batch.features.x_BH @ w_HV + bias_V - batch.labels.y_BV
        losses.append(np.mean(error**2))
        m_w = 0.9 * m_w + batch.features.x_BH.T @ error * 2 / error.size
        m_b = 0.9 * m_b + error.sum(0) * 2 / error.size
        w_HV, bias_V = w_HV - 0.05 * m_w, bias_V - 0.05 * m_b
    return losses


def _initial_weights():
    made = tf.function(lambda: regression.init_fn(tf.constant([0, 0])), jit_compile=True)()
    return made.theta.w_HV.numpy()


@pytest.mark.parametrize(
    ("num_partitions", "steps_per_call", "sizes"), [(1, 1, [1] * 11), (4, 4, [4, 4, 3])]
)
def test_losses_equal_numpys(tmp_path, num_partitions, steps_per_call, sizes):
    recorder = _train(tmp_path, 11, num_partitions=num_partitions, steps_per_call=steps_per_call)
    assert [call.num_steps for call in recorder.calls] == sizes
    np.testing.assert_allclose(recorder.losses, _numpy_losses(_initial_weights(), 11), rtol=1e-4)
    assert recorder.losses[-1] < 0.5 * recorder.losses[0]
    assert _state(tmp_path)[0] == 11


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(tmp_path):
    for stop in (4, 8, 10):
        _train(tmp_path / "stopped", stop, steps_per_call=2)
    _train(tmp_path / "whole", 10, steps_per_call=2)
    step, stopped, stopped_input = _state(tmp_path / "stopped")
    _, whole, whole_input = _state(tmp_path / "whole")
    assert (step, stopped_input, whole_input) == (10, {"index": 10}, {"index": 10})
    for path, array in whole.items():
        np.testing.assert_array_equal(stopped[path], array, err_msg=path)


@pytest.mark.slow
def test_functions_get_copies_of_params(tmp_path):
    """TensorFlow's estimators pass deep copies, too."""

    def model_fn(state, features, labels, mode, params):
        if mode == Mode.EVAL:
            params.task.learning_rate = 0.0
        return regression.model_fn(state, features, labels, mode, params)

    def input_fn(params):
        params.task.learning_rate = 1e6
        return regression.Batches(num_batches=2)

    params = regression.model_params()
    estimator = regression.make(tmp_path, model_fn=model_fn, params=params)
    estimator.train(lambda p: regression.Batches(), max_steps=2)
    estimator.evaluate(input_fn)
    params.task.learning_rate = 7.0

    recorder = _Recorder()
    estimator.train(lambda p: regression.Batches(), max_steps=5, hooks=[recorder])
    np.testing.assert_allclose(recorder.losses, _numpy_losses(_initial_weights(), 5)[2:], rtol=1e-4)
    assert estimator.evaluate(input_fn)["step"] == 5


@pytest.mark.slow
def test_prefetched_batches_are_not_lost(tmp_path):
    """The checkpoint's input state belongs to the steps done, not to the batches read ahead."""
    _train(tmp_path, 7, steps_per_call=2, save_checkpoints_steps=2, keep_checkpoint_max=9)
    parts = regression.make(tmp_path).partitioning
    shardings = specs.shardings(parts, regression.STATE, specs.device_mesh(parts))
    with Checkpoints(tmp_path) as saved:
        assert saved.steps() == [2, 4, 6, 7]
        for step in saved.steps():
            restored = saved.restore(step, regression.STATE, shardings)
            assert int(restored.state.step) == restored.input_state["index"] == step


def test_steps_counts_from_the_last_checkpoint(tmp_path):
    estimator = regression.make(tmp_path)
    for _ in range(2):
        estimator.train(lambda p: regression.Batches(), steps=3)
    assert _state(tmp_path)[0] == 6
    with pytest.raises(ValueError, match=r"steps \(1\) or max_steps \(2\), not both"):
        estimator.train(lambda p: regression.Batches(), steps=1, max_steps=2)


@pytest.mark.slow
def test_training_ends_with_its_input_and_closes_it(tmp_path):
    source, recorder = regression.Batches(num_batches=5), _Recorder()
    regression.make(tmp_path, steps_per_call=2).train(lambda p: source, hooks=[recorder])
    assert [call.num_steps for call in recorder.calls] == [2, 2, 1]
    assert source.closed and recorder.ended == 1
    assert _state(tmp_path)[0] == 5


def test_an_inputs_error_reaches_the_caller(tmp_path):
    class _Broken(regression.Batches):
        def __next__(self):
            raise OSError("the disk is gone")

    recorder = _Recorder()
    with pytest.raises(OSError, match="the disk is gone"):
        regression.make(tmp_path).train(lambda p: _Broken(), max_steps=3, hooks=[recorder])
    assert recorder.ended == 1


def test_a_non_finite_loss_stops_training(tmp_path):
    estimator = regression.make(tmp_path, steps_per_call=4, save_checkpoints_steps=4)
    with pytest.raises(NonFiniteLossError, match="loss of step 6 is nan.* is of step 4"):
        estimator.train(lambda p: regression.Batches(poisoned_batch=5), max_steps=12)
    assert _state(tmp_path)[0] == 4


def _skipping(state, features, labels, mode, params):
    """The regression, which leaves its state unchanged if the loss is not a number."""
    spec = regression.model_fn(state, features, labels, mode, params)
    if mode != Mode.TRAIN:
        return spec
    good = tf.math.is_finite(spec.loss)
    pairs = zip(state.Flatten(), spec.train_op.Flatten(), strict=True)
    kept = state.Pack(tf.where(good, new, old) for old, new in pairs)
    return dataclasses.replace(
        spec,
        train_op=NestedMap(kept, step=state.step + 1),
        metrics=NestedMap(spec.metrics, skipped=1.0 - tf.cast(good, tf.float32)),
    )


@pytest.mark.slow
def test_a_step_with_a_non_finite_loss_may_be_skipped(tmp_path):
    options = {"model_fn": _skipping, "on_nonfinite": NonFinite.SKIP, "steps_per_call": 4}
    regression.make(tmp_path / "skipping", **options).train(
        lambda p: regression.Batches(poisoned_batch=5), max_steps=8
    )
    weights = _state(tmp_path / "skipping")[1]
    assert int(weights["step"]) == 8 and all(np.isfinite(x).all() for x in weights.values())
    recorder = _train(tmp_path / "skipping", 9, **options)
    assert np.isfinite(recorder.losses).all()


@pytest.mark.slow
def test_checkpoints_by_time(tmp_path, monkeypatch):
    """By a clock that cannot be set: the wall clock may jump."""
    wall = itertools.count(10**9, -86400)
    monkeypatch.setattr(time, "time", lambda: next(wall))
    options = {"save_checkpoints_steps": 10**6, "keep_checkpoint_max": 99}
    always = _train(tmp_path / "always", 5, save_checkpoints_secs=1e-9, **options)
    assert always.saved == [1, 2, 3, 4, 5]
    assert _train(tmp_path / "never", 5, save_checkpoints_secs=1e9, **options).saved == [5]
    with pytest.raises(ValueError, match="train.save_checkpoints_secs must be more than 0, got 0"):
        regression.make(tmp_path, save_checkpoints_secs=0)


def test_evaluate_combines_sums_and_weights_exactly(tmp_path):
    _train(tmp_path, 2)
    estimator = regression.make(tmp_path)
    result = estimator.evaluate(lambda p: regression.Batches(num_batches=3), name="dev")
    _, state, _ = _state(tmp_path)
    total = weight = 0.0
    for i in range(3):
        batch = regression.Batches().batch(i)
        out_BV = batch.features.x_BH @ state["theta.w_HV"] + state["theta.bias_V"]
        squares_B = ((out_BV - batch.labels.y_BV) ** 2).sum(1)
        total += float((squares_B * batch.labels.weight_B).sum())
        weight += float(batch.labels.weight_B.sum())
    np.testing.assert_allclose(result["error"], total / weight, rtol=1e-6)
    assert (result["step"], result["num_batches"]) == (2, 3)
    one = estimator.evaluate(lambda p: regression.Batches(num_batches=3), steps=1)
    assert one["num_batches"] == 1 and one["error"] != result["error"]
    lines = [json.loads(line) for line in (tmp_path / "eval_metrics.jsonl").open()]
    assert [line["name"] for line in lines] == ["dev", "eval"]
    assert lines[0]["error"] == result["error"]


class _Lengths(regression.Batches):
    """Only features; the second batch is longer than the first."""

    def __init__(self, num_batches):
        super().__init__(num_batches)
        self.specs = NestedMap(features=self.specs.features)

    def __next__(self):
        batch = super().__next__()
        x_BH = np.concatenate([batch.features.x_BH] * self._index)
        return NestedMap(features=NestedMap(x_BH=x_BH))


@pytest.mark.slow
def test_predict_yields_every_row_in_order(tmp_path):
    _train(tmp_path, 2)
    rows = list(regression.make(tmp_path, 4).predict(lambda p: _Lengths(num_batches=2)))
    _, state, _ = _state(tmp_path)
    xs = [batch.features.x_BH for batch in _Lengths(num_batches=2)]
    assert [len(x) for x in xs] == [B, 2 * B]
    want = np.concatenate(xs) @ state["theta.w_HV"] + state["theta.bias_V"]
    assert len(rows) == 3 * B
    np.testing.assert_allclose([row["y_BV"] for row in rows], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([row["total_B"] for row in rows], want.sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_train_metrics_can_be_read(tmp_path):
    _train(tmp_path, 6, steps_per_call=2, log_step_count_steps=4, save_checkpoints_steps=4)
    recorder = _train(tmp_path, 10, steps_per_call=2, log_step_count_steps=4)
    lines = [json.loads(line) for line in (tmp_path / "train_metrics.jsonl").open()]
    assert [(line["step"], line["num_steps"]) for line in lines] == [
        (s, 2) for s in (2, 4, 6, 8, 10)
    ]
    np.testing.assert_allclose(
        [line["metrics"]["loss"] for line in lines[3:]],
        np.mean(np.reshape(recorder.losses, (2, 2)), 1),
    )
    assert len(lines[0]["metrics"]["mean_V"]) == V
    walls = [line["wall_secs"] for line in lines]
    assert walls == sorted(walls) and walls[0] >= lines[0]["secs"] > 0
    events = EventAccumulator(str(tmp_path / "train"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {
        "loss",
        "mean_V/0",
        "mean_V/2",
        "speed/steps_per_sec",
        "speed/tokens_per_sec",
        "speed/input_wait_share",
        "memory/host_peak_gib",
    } <= set(tags)
    losses = events.Scalars("loss")
    assert [event.step for event in losses] == [4, 6, 8, 10]
    np.testing.assert_allclose(
        losses[0].value, np.mean([line["metrics"]["loss"] for line in lines[:2]]), rtol=1e-6
    )


@pytest.mark.slow
def test_lines_after_the_checkpoint_are_dropped_on_resuming(tmp_path):
    _train(tmp_path, 4)
    with (tmp_path / "train_metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "wall_secs": 1.0}\n{"step": 6, "wal')
    _train(tmp_path, 6)
    lines = [json.loads(line) for line in (tmp_path / "train_metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert "metrics" in lines[4]


def _trained(model_dir):
    """Returns an estimator with checkpoints of the steps 1 to 4."""
    options = {"num_partitions": 4, "save_checkpoints_steps": 1}
    _train(model_dir, 4, **options)
    return regression.make(model_dir, **options)


@pytest.mark.slow
def test_weights_are_the_mean_over_the_last_checkpoints(tmp_path):
    """Restored and exported; all but the weights comes from the last checkpoint."""
    estimator = _trained(tmp_path)
    steps = whole_steps(tmp_path)[:3]
    apart = [estimator.restore(step) for step in steps]
    found = estimator.restore(steps[-1], average=3)
    mean = np.mean([each.state.theta.w_HV for each in apart], axis=0, dtype=np.float64)
    np.testing.assert_array_equal(found.state.theta.w_HV, mean.astype(np.float32))
    np.testing.assert_array_equal(found.state.momentum.w_HV, apart[-1].state.momentum.w_HV)
    assert (found.step, found.digest != apart[-1].digest) == (steps[-1], True)

    alone = estimator.restore(steps[-1], weights_alone=True)
    assert (list(alone.state), alone.digest) == (["theta"], apart[-1].digest)
    np.testing.assert_array_equal(alone.state.theta.w_HV, apart[-1].state.theta.w_HV)

    path = tmp_path / "weights.safetensors"
    estimator.export_weights(path, checkpoint_step=steps[-1], average=3)
    exported_HV = exported.read(path)["theta.w_HV"]
    np.testing.assert_array_equal(exported_HV[:, :], found.state.theta.w_HV)


def test_a_mean_over_more_checkpoints_than_there_are_is_refused(tmp_path):
    estimator = _trained(tmp_path)
    message = r"mean of 4 checkpoints up to step \d+ .* there are \[.*keep_checkpoint_max="
    with pytest.raises(ValueError, match=message):
        estimator.restore(whole_steps(tmp_path)[2], average=4)


def test_changed_values_come_first_among_many_differences(tmp_path):
    def text(moe, dim):
        added = [f"task.moe.size_{i} : {i}" for i in range(40)] if moe else ["task.moe : None"]
        return "\n".join([*added, f"task.width : {dim}"]) + "\n"

    (tmp_path / "params.txt").write_text(text(moe=True, dim=8))
    with pytest.raises(ValueError, match="holds another model") as raised:
        config.check_folder(tmp_path, text(moe=False, dim=16), ("task",))
    _, _, differences = str(raised.value).partition("It differs in ")
    assert differences.startswith("task.width: 16, not 8; task.moe")
    assert differences.endswith("; and 39 more settings.")
    assert differences.count(";") == 3


@pytest.mark.slow
def test_another_model_is_refused_and_named(tmp_path):
    _train(tmp_path, 1)
    other = regression.model_params().Set(**{"task.learning_rate": 0.1, "max_steps": 99})
    estimator = regression.make(tmp_path, params=other, model_prefixes=("task",))
    message = r"holds another model.*task.learning_rate: 0.1, not 0.05\.$"
    with pytest.raises(ValueError, match=message):
        estimator.train(lambda p: regression.Batches(), max_steps=2)
    with pytest.raises(ValueError, match=message):
        estimator.evaluate(lambda p: regression.Batches(num_batches=1))
    same = regression.model_params().Set(max_steps=99)
    regression.make(tmp_path, params=same, model_prefixes=("task",)).train(
        lambda p: regression.Batches(), max_steps=2
    )
    assert "max_steps : 99" in (tmp_path / "params.txt").read_text()
    with pytest.raises(ValueError, match="max_steps: 10, not 99"):
        regression.make(tmp_path).train(lambda p: regression.Batches(), max_steps=2)


def test_there_is_nothing_to_evaluate(tmp_path):
    estimator = regression.make(tmp_path / "none")
    with pytest.raises(ValueError, match="none: there is no checkpoint; train first"):
        estimator.evaluate(lambda p: regression.Batches(num_batches=1))
    with pytest.raises(ValueError, match="there is no checkpoint"):
        estimator.predict(lambda p: regression.Batches(num_batches=1))
    assert not (tmp_path / "none").exists()
    estimator.train(lambda p: regression.Batches(), max_steps=1)
    with pytest.raises(ValueError, match="the input has no batches"):
        estimator.evaluate(lambda p: regression.Batches(num_batches=0))
    with pytest.raises(ValueError, match=r"checkpoints/7: no whole checkpoint; there are \[1\]"):
        estimator.evaluate(lambda p: regression.Batches(num_batches=1), checkpoint_step=7)


def test_a_state_that_init_fn_does_not_make_is_refused(tmp_path):
    spec = NestedMap(regression.STATE, extra=regression.f32((5,), "_"))
    with pytest.raises(ValueError, match="initialize: no result state.extra is returned"):
        _train(tmp_path, 1, state_spec=spec)
    theta = NestedMap(regression.STATE.theta, bias_V=regression.f32((V + 1,), "V"))
    spec = NestedMap(regression.STATE, theta=theta)
    with pytest.raises(
        ValueError, match="init_fn differs from state_spec: theta.bias_V is .*3.*, expected .*4"
    ):
        _train(tmp_path, 1, state_spec=spec)
    with pytest.raises(ValueError, match="the state needs `step`, an int32 scalar"):
        regression.make(tmp_path, state_spec=NestedMap(theta=theta))


def test_the_initial_state_is_split_over_the_devices(tmp_path):
    shapes = []

    class _Shapes(TrainHook):
        def after_save(self, step, state):
            shapes.append([s.data.shape for s in state.theta.w_HV.addressable_shards])

    regression.make(tmp_path, 4).train(
        lambda p: regression.Batches(), max_steps=1, hooks=[_Shapes()]
    )
    assert shapes == [[(H // 4, V)] * 4]
