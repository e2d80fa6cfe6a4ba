"""A TPUEstimator program with TensorFlow's names: configuration, host_call, eval_metrics."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import metrics
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.train import config as config_check
from lingvo_gshard.train.estimator import TPUEstimator
from lingvo_gshard.train.run_config import DatasetInput, RunConfig, TPUConfig

STATE = NestedMap(
    step=TensorSpec((), "int32", ""), theta=NestedMap(w=TensorSpec((3,), "float32", "_"))
)
_X = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
_Y = (_X @ np.float32([1, -2, 3]) > 0).astype("int32")


class _Program:
    """A perceptron as a classifier, and a record of the calls of its functions."""

    def __init__(self, has_names):
        self.has_names = has_names
        self.host_calls = []
        self.batch_sizes = []

    def init_fn(self, seed):
        return NestedMap(step=tf.constant(0), theta=NestedMap(w=tf.zeros([3])))

    def input_fn(self, params):
        self.batch_sizes.append(params["batch_size"])
        dataset = tf.data.Dataset.from_tensor_slices(({"x": _X}, _Y))
        return DatasetInput(dataset.repeat(3).batch(params["batch_size"], drop_remainder=True))

    def model_fn(self, state, features, labels, mode, params):
        assert features.x.shape[0] == params["batch_size"]
        score = tf.linalg.matvec(features.x, state.theta.w)
        predictions = tf.cast(score > 0, tf.int32)
        if mode == Mode.PREDICT:
            return TPUEstimatorSpec(mode, predictions=NestedMap(y=predictions))

        error = tf.cast(labels - predictions, tf.float32)
        loss = tf.reduce_mean(tf.square(error))
        if mode == Mode.EVAL:

            def metric_fn(labels, predictions):
                weights = tf.cast(1 + labels, tf.float32)
                return {
                    "accuracy": metrics.accuracy(labels, predictions),
                    "weighted": metrics.mean(predictions, weights),
                }

            return TPUEstimatorSpec(
                mode, loss=loss, eval_metrics=(metric_fn, [labels, predictions])
            )

        w = state.theta.w + params["rate"] * tf.linalg.matvec(features.x, error, transpose_a=True)
        train_op = NestedMap(step=state.step + 1, theta=NestedMap(w=w))
        tensors = [state.step, w]
        if self.has_names:
            tensors = {"w": w, "step": state.step}

        def host_fn(step, w):
            self.host_calls.append((int(step), w))
            return {"norm": np.linalg.norm(w)} if step % 2 else None

        return TPUEstimatorSpec(mode, loss=loss, train_op=train_op, host_call=(host_fn, tensors))

    def estimator(self, model_dir, num_shards=2, **arguments):
        tpu_config = TPUConfig(iterations_per_loop=4, num_shards=num_shards)
        return TPUEstimator(
            self.model_fn,
            config=RunConfig(model_dir=str(model_dir), tpu_config=tpu_config),
            state_spec=STATE,
            init_fn=self.init_fn,
            params=arguments.pop("params", {"rate": 0.1}),
            train_batch_size=8,
            eval_batch_size=20,
            predict_batch_size=10,
            show_progress=False,
            **arguments,
        )


def _numpy_weights(num_steps):
    """The weights after each step, written out in NumPy."""
    w = np.zeros(3, np.float32)
    weights = []
    for step in range(num_steps):
        x = _X[step % 5 * 8 :][:8]
        y = _Y[step % 5 * 8 :][:8]
        w = w + np.float32(0.1) * (y - (x @ w > 0)) @ x
        weights.append(w)
    return weights


@pytest.mark.slow
def test_host_call_is_called_for_each_step_with_its_values(tmp_path):
    program = _Program(has_names=True)
    program.estimator(tmp_path).train(program.input_fn, max_steps=6)  # Calls of 4 and 2 steps.
    steps, weights = zip(*program.host_calls, strict=True)
    assert steps == tuple(range(6)) and program.batch_sizes == [8]
    np.testing.assert_allclose(weights, _numpy_weights(6), rtol=1e-5, atol=1e-6)

    events = EventAccumulator(f"{tmp_path}/train").Reload().Scalars("norm")
    assert [event.step for event in events] == [2, 4, 6]
    norms = np.linalg.norm(weights, axis=1)[1::2]
    np.testing.assert_allclose([event.value for event in events], norms, rtol=1e-6)


@pytest.mark.slow
def test_metrics_of_a_function_and_each_modes_batch_size(tmp_path):
    program = _Program(has_names=False)
    estimator = program.estimator(tmp_path).train(program.input_fn, max_steps=4)
    results = estimator.evaluate(program.input_fn, steps=2)
    predicted = [row["y"] for row in estimator.predict(program.input_fn)][:40]
    assert program.batch_sizes == [8, 20, 10]

    expected = (_X @ _numpy_weights(4)[-1] > 0).astype(int)
    np.testing.assert_array_equal(predicted, expected)
    assert results["accuracy"] == pytest.approx(np.mean(expected == _Y))
    assert results["loss"] == pytest.approx(np.mean((expected - _Y) ** 2))
    assert results["weighted"] == pytest.approx(np.average(expected, weights=1 + _Y))


@pytest.mark.slow
def test_a_dataset_continues_where_training_stopped(tmp_path):
    program = _Program(has_names=False)
    program.estimator(tmp_path).train(program.input_fn, max_steps=3)
    # On another number of devices, until the input ends: 3 times 5 batches.
    program.estimator(tmp_path, num_shards=1).train(program.input_fn)
    np.testing.assert_allclose(program.host_calls[-1][1], _numpy_weights(15)[-1], rtol=1e-5)
    assert [step for step, _ in program.host_calls] == list(range(15))


def test_a_run_config_fills_the_settings_of_training():
    config = RunConfig(tf_random_seed=7, save_checkpoints_secs=60.0, keep_checkpoint_max=2)
    p = config.params({"rate": 0.1})
    assert (p.rate, p.train.seed, p.train.keep_checkpoint_max) == (0.1, 7, 2)
    assert p.train.save_checkpoints_secs == 60 and p.train.save_checkpoints_steps > 10**9
    assert RunConfig().train_params().save_checkpoints_steps == 1000
    for keeps_all in (None, 0):  # As in TensorFlow.
        p = RunConfig(keep_checkpoint_max=keeps_all).train_params()
        config_check.check(p.Set(max_steps=1))
        assert p.keep_checkpoint_max is None
    assert RunConfig().partitioning().mesh.num_partitions == 8  # All devices of the tests.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": {"batch_size": 8}, "config": RunConfig("d")}, "the estimator sets batch_size"),
        ({"params": {}}, "give model_dir and either a RunConfig, or Params and a partitioning"),
        ({"config": RunConfig()}, "give model_dir and either"),
        ({"train_batch_size": 8}, "batch sizes need a RunConfig"),
        (
            {"params": RunConfig().params({}), "config": RunConfig("d")},
            "params are a dict, got Par",
        ),
    ],
)
def test_incompatible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TPUEstimator(None, state_spec=STATE, init_fn=None, **arguments)


def test_a_dataset_without_known_sizes_and_a_late_host_call_are_refused():
    dataset = tf.data.Dataset.from_tensor_slices(_X).batch(8)
    with pytest.raises(ValueError, match=r"a batch has shape \(None, 3\).*drop_remainder=True"):
        DatasetInput(dataset)
    with pytest.raises(ValueError, match="host_call needs mode TRAIN, got PREDICT"):
        TPUEstimatorSpec(Mode.PREDICT, predictions=NestedMap(y=1), host_call=(print, []))


class _Sides(NamedTuple):
    left: Any
    right: Any


def _dataset(elements):
    return tf.data.Dataset.from_tensor_slices(elements).batch(8, drop_remainder=True)


def test_features_may_be_tuples():
    """A named tuple keeps its names, as in TensorFlow."""
    plain = DatasetInput(_dataset(((_X, _Y), {"y": _Y})))
    left, right = next(iter(plain)).features
    np.testing.assert_array_equal(left, _X[:8])
    np.testing.assert_array_equal(right, _Y[:8])
    assert [spec.shape for spec in plain.specs.features] == [(8, 3), (8,)]

    named = DatasetInput(_dataset((_Sides(_X, (_Y, _Y)), _Y)))
    features = next(iter(named)).features
    np.testing.assert_array_equal(features.left, _X[:8])
    assert [len(y) for y in features.right] == [8, 8]


def test_elements_of_another_structure_are_refused():
    with pytest.raises(ValueError, match=r"a tuple of 3; expected \(features, labels\)\. Put wei"):
        DatasetInput(_dataset((_X, _Y, _Y)))
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(ValueError, match="expected dense tensors, got RaggedTensorSpec"):
        DatasetInput(tf.data.Dataset.from_tensor_slices((ragged, [1, 2])))


@pytest.mark.slow
def test_a_dataset_input_serves_two_evaluations(tmp_path):
    """The second evaluation begins at the first batch again, whether the first one ended or not."""
    program = _Program(has_names=False)
    estimator = program.estimator(tmp_path).train(program.input_fn, max_steps=4)
    dataset = tf.data.Dataset.from_tensor_slices(({"x": _X}, _Y)).batch(20, drop_remainder=True)
    source = DatasetInput(dataset)
    first = estimator.evaluate(lambda params: source, steps=1)
    whole = [estimator.evaluate(lambda params: source) for _ in range(2)]
    assert [results["num_batches"] for results in whole] == [2, 2]
    assert whole[0]["loss"] == whole[1]["loss"]

    correct = (_X @ _numpy_weights(4)[-1] > 0) == _Y
    assert first["accuracy"] == pytest.approx(correct[:20].mean())
    assert whole[0]["accuracy"] == pytest.approx(correct.mean())
