"""Runs that begin or cease to keep moving averages of their weights."""

import numpy as np
import pytest
import safetensors.numpy

from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import weight_average
from lingvo_gshard.train import config
from lingvo_gshard.train.config import train_params
from lingvo_gshard.train.estimator import Estimator
from tests.train import regression

_STATE = NestedMap(regression.STATE, ema=regression.STATE.theta)


def _init_fn(seed):
    state = regression.init_fn(seed)
    return NestedMap(state, ema=state.theta)


def _model_fn(state, features, labels, mode, params):
    """The regression, with averages of its weights."""
    ema = state.ema
    rest = NestedMap({name: tree for name, tree in state.items() if name != "ema"})
    evaluated = rest if mode.name == "TRAIN" else NestedMap(rest, theta=ema)
    spec = regression.model_fn(evaluated, features, labels, mode, params)
    if spec.train_op is not None:
        theta = spec.train_op.theta
        spec.train_op.ema = weight_average.averaged(ema, theta, state.step, params.train.ema_decay)
    return spec


def _averaging(folder, **options) -> Estimator:
    return regression.make(
        folder, model_fn=_model_fn, init_fn=_init_fn, state_spec=_STATE, ema_decay=0.9, **options
    )


def _train(estimator, max_steps):
    estimator.train(lambda p: regression.Batches(), max_steps=max_steps)
    return estimator


def _dev(estimator):
    return estimator.evaluate(lambda p: regression.Batches(num_batches=2))["error"]


@pytest.mark.slow
def test_averages_are_restored_evaluated_and_exported(tmp_path):
    averaging = _train(_averaging(tmp_path / "run", keep_checkpoint_max=2), 3)
    _train(averaging, 6)
    at_once = _train(_averaging(tmp_path / "at_once"), 6)
    one = averaging.restore().state
    other = at_once.restore().state
    np.testing.assert_array_equal(np.asarray(one.ema.w_HV), np.asarray(other.ema.w_HV))

    # In a state for evaluation, the averages are the weights.
    np.testing.assert_array_equal(np.asarray(one.theta.w_HV), np.asarray(one.ema.w_HV))
    plain = regression.make(tmp_path / "run")
    raw = plain.restore().state
    assert "ema" not in raw and (np.asarray(raw.theta.w_HV) != np.asarray(one.ema.w_HV)).any()
    assert _dev(plain) != _dev(averaging)

    averaging.export_weights(tmp_path / "weights.safetensors")
    exported = safetensors.numpy.load_file(tmp_path / "weights.safetensors")
    assert sorted(exported) == ["theta.bias_V", "theta.w_HV"]
    np.testing.assert_array_equal(exported["theta.w_HV"], np.asarray(one.ema.w_HV))

    # The mean over checkpoints is the mean of their averages.
    means = averaging.restore(average=2).state
    first = averaging.restore(3).state.ema.w_HV
    want = (np.asarray(first) + np.asarray(one.ema.w_HV)) / 2
    np.testing.assert_allclose(np.asarray(means.theta.w_HV), want, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(means.theta.w_HV), np.asarray(means.ema.w_HV))

    # Decoding reads only the weights.
    alone = averaging.restore(average=2, weights_alone=True).state
    assert list(dict(alone.FlattenItems())) == ["theta.bias_V", "theta.w_HV"]
    np.testing.assert_array_equal(np.asarray(alone.theta.w_HV), np.asarray(means.theta.w_HV))


def test_a_damaged_average_is_found(tmp_path):
    averaging = _train(_averaging(tmp_path), 3)
    with Checkpoints(tmp_path) as saved:
        saved.arrays(3)["ema.w_HV"].unchecked[0, 0] = 9

    with pytest.raises(ValueError, match=r"damaged: ema\.w_HV is not what was saved"):
        averaging.restore(3, weights_alone=True)


@pytest.mark.slow
def test_averages_start_from_the_weights_of_a_run_without(tmp_path, caplog):
    plain = _train(regression.make(tmp_path, keep_checkpoint_max=2), 3)
    weights = np.asarray(plain.restore().state.theta.w_HV)
    averaging = _averaging(tmp_path, keep_checkpoint_max=2)
    before = averaging.restore().state
    np.testing.assert_array_equal(np.asarray(before.ema.w_HV), weights)
    assert "checkpoints/3: has no moving averages; they start from its weights." in caplog.text

    _train(averaging, 4)
    state = regression.make(tmp_path).restore().state
    assert "checkpoints/4: its moving averages of weights are left out." in caplog.text
    rate = 0.1 / (1 - 0.9**4)
    want = weights + rate * (np.asarray(state.theta.w_HV) - weights)
    np.testing.assert_allclose(np.asarray(averaging.restore().state.ema.w_HV), want, rtol=1e-5)
    with pytest.raises(ValueError, match="not all of the 2 checkpoints up to step 4 have ema.bias"):
        averaging.restore(average=2)


def test_a_decay_without_averages_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train.ema_decay=0.9 needs a state with `ema`"):
        regression.make(tmp_path, ema_decay=0.9)
    with pytest.raises(ValueError, match=r"train.ema_decay must be in \[0, 1\), or None, got 1.0"):
        regression.make(tmp_path, ema_decay=1.0)


def test_a_model_fn_freezes_no_weights(tmp_path):
    with pytest.raises(ValueError, match="train.frozen='theta.b.*', but a model_fn updates its"):
        regression.make(tmp_path, frozen="theta.b.*")


def test_a_model_fn_does_not_accumulate(tmp_path):
    with pytest.raises(ValueError, match="accumulation_steps=2, but a model_fn computes its own"):
        regression.make(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be 1 or more, got 0"):
        config.check(train_params().Set(max_steps=1, gradient_accumulation_steps=0))
