"""Early stopping, compared with Keras, and over restarts."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.train.early_stopping import EarlyStop
from lingvo_gshard.train.estimator import EvalSpec
from lingvo_gshard.train.train_and_evaluate import train_and_evaluate
from tests import exhaustive
from tests.train import regression


def _keras_stop(values, patience, min_gain, higher_is_better):
    """Returns the number of evaluations after which Keras stops; None if it does not."""
    callback = tf.keras.callbacks.EarlyStopping(
        monitor="metric",
        min_delta=min_gain,
        patience=patience,
        mode="max" if higher_is_better else "min",
    )

    class Model:
        stop_training = False

    model = Model()
    callback.set_model(model)
    callback.on_train_begin()
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"metric": value})
        if model.stop_training:
            return epoch + 1
    return None


def _stop(values, patience, min_gain, higher_is_better):
    rule = EarlyStop("dev", "metric", higher_is_better, patience, min_gain)
    for count in range(1, len(values) + 1):
        steps = range(10, 10 * count + 1, 10)
        if rule.reason(dict(zip(steps, values, strict=False))) is not None:
            return count
    return None


@pytest.mark.slow
@pytest.mark.parametrize("patience", [1, *exhaustive.only(2, 4)])
@pytest.mark.parametrize("min_gain", [0.0, 0.25])
def test_it_stops_at_the_same_step_as_keras(patience, min_gain):
    rng = np.random.default_rng(5)
    stops = []
    for higher_is_better in (False, True):
        for _ in range(20):
            # Multiples of 1/8, so that equal values and gains of exactly 1/4 occur.
            values = list(np.round(8 * rng.standard_normal(12)) / 8)
            got = _stop(values, patience, min_gain, higher_is_better)
            assert got == _keras_stop(values, patience, min_gain, higher_is_better), values
            stops.append(got)
    assert len(set(stops)) > 1


def test_nan_is_not_an_improvement():
    rule = EarlyStop("dev", "nll", False, patience=2, min_gain=0.01)
    assert rule.reason({10: 3.0, 20: math.nan}) is None
    assert rule.reason({10: 3.0, 20: math.nan, 30: 2.995}) == (
        "nll of dev has not improved by more than 0.01 in 2 evaluations; the best is 3 at step 10"
    )
    assert rule.reason({10: math.nan, 20: math.nan}).endswith("; it is not a number")


def _spec(best_by="error"):
    return EvalSpec(lambda p: regression.Batches(num_batches=2), name="dev", best_by=best_by)


def _run(folder, spec=None, **settings):
    estimator = regression.make(folder, save_checkpoints_steps=1, **settings)
    return train_and_evaluate(
        estimator, lambda p: regression.Batches(), spec or _spec(), max_steps=12
    )


def _steps(folder):
    lines = [json.loads(line) for line in (folder / "eval_metrics.jsonl").open()]
    return [line["step"] for line in lines]


@pytest.mark.slow
def test_a_run_ends_early_and_stays_ended(tmp_path, capsys):
    """No gain reaches 1000, so the first evaluation stays the best."""
    settings = {"early_stop_patience": 2, "early_stop_min_gain": 1000.0}
    last = _run(tmp_path, **settings)
    assert _steps(tmp_path) == [1, 2, 3] and last["step"] == 3
    assert capsys.readouterr().out.startswith(
        "Training ends early, after step 3: error of dev has not improved by more than 1000 in 2 "
        "evaluations; the best is "
    )

    # Another start evaluates again, but does not train.
    assert _run(tmp_path, **settings)["step"] == 3
    assert _steps(tmp_path) == [1, 2, 3, 3]
    assert "Training ends early, after step 3: " in capsys.readouterr().out

    # With more patience, training continues from the same evaluations.
    settings["early_stop_patience"] = 4
    assert _run(tmp_path, **settings)["step"] == 5
    assert _steps(tmp_path)[4:] == [4, 5]


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="early_stop_patience=1 needs a metric to compare: set tr"):
        _run(tmp_path, _spec(best_by=None), early_stop_patience=1)
    with pytest.raises(ValueError, match="early_stop_patience must be 1 or more, or None, got 0"):
        regression.make(tmp_path, early_stop_patience=0)
    with pytest.raises(ValueError, match="early_stop_min_gain must be 0 or more, got -1"):
        regression.make(tmp_path, early_stop_min_gain=-1.0)
