"""A TPUEstimator program of plain dicts and a Dataset, and its mistakes in one line."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.train import run_config
from lingvo_gshard.train.estimator import TPUEstimator
from lingvo_gshard.train.run_config import DatasetInput, RunConfig, TPUConfig

_STATE = {"step": TensorSpec((), "int32", ""), "theta": {"w": TensorSpec([2], np.float32, "_")}}
_X = np.random.default_rng(0).standard_normal((16, 2)).astype("float32")


def _init_fn(seed):
    return {"step": tf.constant(0), "theta": {"w": tf.zeros([2])}}


def _loss(state, features, labels):
    return tf.reduce_mean((tf.linalg.matvec(features["x"], state.theta["w"]) - labels) ** 2)


def _model_fn(state, features, labels, mode, params):
    if mode == Mode.PREDICT:
        return TPUEstimatorSpec(mode, predictions={"y": features.x[:, 0] * state.theta.w[0]})
    loss = _loss(state, features, labels)
    if mode == Mode.EVAL:
        return TPUEstimatorSpec(mode, eval_metrics={"loss": (loss, tf.constant(1.0))})
    with tf.GradientTape() as tape:
        tape.watch(state.theta.w)
        loss = _loss(state, features, labels)
    w = state.theta.w - 0.1 * tape.gradient(loss, state.theta.w)
    return TPUEstimatorSpec(mode, loss=loss, train_op={"step": state.step + 1, "theta": {"w": w}})


def _dataset(params):
    """A Dataset as it is, not wrapped."""
    pairs = tf.data.Dataset.from_tensor_slices(({"x": _X}, _X @ np.float32([1, -2])))
    return pairs.repeat().batch(8, drop_remainder=True)


class _Batches:
    """An input of plain dicts."""

    specs: ClassVar = {
        "features": {"x": TensorSpec((8, 2), "float32", "B_")},
        "labels": TensorSpec((8,), "float32", "B"),
    }

    def __iter__(self):
        for _ in range(3):
            yield {"features": {"x": _X[:8]}, "labels": _X[:8] @ np.float32([1, -2])}

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


def _estimator(folder, model_fn=_model_fn, **changes):
    fields = {"state_spec": _STATE, "init_fn": _init_fn, "show_progress": False}
    config = RunConfig(str(folder), tpu_config=TPUConfig(iterations_per_loop=2, num_shards=2))
    return TPUEstimator(model_fn, config=config, **(fields | changes))


def test_it_trains_evaluates_and_predicts(tmp_path):
    estimator = _estimator(tmp_path)
    before = estimator.train(_dataset, max_steps=2).evaluate(_dataset, steps=1)["loss"]
    after = estimator.train(lambda params: _Batches(), max_steps=5).evaluate(_dataset, steps=1)
    assert after["loss"] < before and after["step"] == 5
    predictions = estimator.predict(lambda params: _dataset(params).take(1))
    assert len([row["y"] for row in predictions]) == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": Mode.TRAIN}, "mode TRAIN needs loss, train_op"),
        ({"mode": "train"}, "mode 'train': expected one of Mode.TRAIN, Mode.EVAL, Mode.PREDICT"),
        (
            {"mode": Mode.TRAIN, "loss": 1.0, "train_op": {"theta": {}}},
            r"train_op lacks step: add step=state.step \+ 1",
        ),
        ({"mode": Mode.TRAIN, "loss": 1.0, "train_op": 3}, "train_op: expected a dict by name"),
        (
            {"mode": Mode.TRAIN, "loss": np.ones(3), "train_op": {"step": 1}},
            r"loss has shape \(3,\); expected a scalar",
        ),
        ({"mode": Mode.PREDICT, "predictions": 3}, "predictions: expected a dict by name"),
    ],
)
def test_a_spec_names_its_missing_fields(fields, message):
    with pytest.raises(ValueError, match=f"TPUEstimatorSpec: {message}"):
        TPUEstimatorSpec(**fields)


def test_a_model_fn_that_returns_nothing_is_named(tmp_path):
    estimator = _estimator(tmp_path, model_fn=lambda *args: None)
    message = "model_fn: expected a TPUEstimatorSpec in mode TRAIN, got NoneType; is a `return` mis"
    with pytest.raises(ValueError, match=message):
        estimator.train(_dataset, max_steps=2)


def test_a_train_op_without_a_weight_is_named(tmp_path):
    def model_fn(state, features, labels, mode, params):
        loss = _loss(state, features, labels)
        return TPUEstimatorSpec(mode, loss=loss, train_op={"step": state.step + 1})

    message = r"train_op differs from state_spec: theta.w is absent, expected float32\[2\]"
    with pytest.raises(ValueError, match=message):
        _estimator(tmp_path, model_fn=model_fn).train(_dataset, max_steps=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_fn": lambda features, labels, mode, params: None}, r"model_fn: .* \(state, feat"),
        ({"init_fn": lambda: None}, r"init_fn: expected a function of \(seed\): too many"),
        ({"train_batch_size": "8"}, "train_batch_size must be a whole number, 1 or more, got '8'"),
    ],
)
def test_arguments_of_another_form_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"TPUEstimator: {message}"):
        _estimator(tmp_path, **changes)


def test_input_fn_hooks_and_model_dir_of_another_kind_are_refused(tmp_path):
    estimator = _estimator(tmp_path)
    with pytest.raises(ValueError, match=r"input_fn: expected a function of \(params\), got "):
        estimator.train(_dataset({}), max_steps=2)
    with pytest.raises(ValueError, match=r"hooks\[0\]: expected TrainHook, got builtin"):
        estimator.train(_dataset, max_steps=2, hooks=[print])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; a folder is expected"):
        _estimator(tmp_path / "file").train(_dataset, max_steps=2)


def test_a_state_of_variables_is_refused_with_a_correction(tmp_path):
    state = {"step": TensorSpec((), "int32", ""), "w": tf.Variable([1.0, 2.0])}
    message = r"state_spec.w: expected a TensorSpec, got ResourceVariable: TensorSpec\(x.shape, x"
    with pytest.raises(ValueError, match=message):
        _estimator(tmp_path, state_spec=state)
    with pytest.raises(ValueError, match="state_spec: expected a dict by name"):
        _estimator(tmp_path, state_spec=TensorSpec((), "int32", ""))


def test_a_state_that_init_fn_does_not_return_is_named(tmp_path):
    estimator = _estimator(tmp_path, init_fn=lambda seed: None)
    with pytest.raises(ValueError, match="what init_fn returns: expected a dict .*, got NoneType"):
        estimator.train(_dataset, max_steps=2)


@pytest.mark.parametrize("given", [(_X, _X), None, [1, 2]])
def test_an_input_of_another_kind_is_refused(given):
    with pytest.raises(
        ValueError, match="input_fn: returned .*; expected a tf.data.Dataset, or an"
    ):
        run_config.as_input(given)


def test_a_dataset_is_an_input_unless_processes_share_it(monkeypatch):
    assert isinstance(run_config.as_input(_dataset(None)), DatasetInput)
    monkeypatch.setattr(run_config.jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"return DatasetInput\(dataset, share\)"):
        run_config.as_input(_dataset(None))
