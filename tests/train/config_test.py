"""Settings of training and specs of a mode refuse what cannot be."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import ModeKeys, TPUEstimatorSpec
from lingvo_gshard.train import config
from tests.train import regression


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("iterations_per_loop", 0, "train.iterations_per_loop must be 1 or more, got 0"),
        ("save_checkpoints_steps", 0, "train.save_checkpoints_steps must be 1 or more, got 0"),
        ("save_checkpoints_secs", 0.0, "train.save_checkpoints_secs must be more than 0, got 0.0"),
        ("keep_checkpoint_max", -1, "train.keep_checkpoint_max must be 1 or more, got -1"),
        ("keep_checkpoint_every_n_hours", 0.0, "every_n_hours must be more than 0, got 0.0"),
        ("seed", 2**31, r"train.seed must be from 0 to 2\*\*31 - 1, got 2147483648"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, message):
    config.check(config.train_params())
    with pytest.raises(ValueError, match=message):
        config.check(config.train_params().Set(**{name: value}))


def test_an_estimator_needs_the_settings_and_checks_them(tmp_path):
    with pytest.raises(ValueError, match="train.seed must be"):
        regression.make(tmp_path, seed=-1)
    params = regression.model_params()
    estimator = regression.make(tmp_path, params=params)
    with pytest.raises(ValueError, match=r"params lack .*Define\(\"train\", config.train_params"):
        type(estimator)(
            regression.model_fn,
            str(tmp_path),
            params=Params(),
            partitioning=estimator.partitioning,
            state_spec=regression.STATE,
            init_fn=regression.init_fn,
        )


def test_a_spec_without_what_its_mode_needs():
    with pytest.raises(ValueError, match="mode TRAIN needs train_op"):
        TPUEstimatorSpec(ModeKeys.TRAIN, loss=tf.constant(1.0))
    with pytest.raises(ValueError, match="mode EVAL needs eval_metrics"):
        TPUEstimatorSpec(ModeKeys.EVAL, eval_metrics={})
    with pytest.raises(ValueError, match="mode PREDICT needs predictions"):
        TPUEstimatorSpec(ModeKeys.PREDICT)
    TPUEstimatorSpec(ModeKeys.PREDICT, predictions=NestedMap(y=tf.constant(1.0)))
