"""Configs and specs refuse what cannot be."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import ModeKeys, TPUEstimatorSpec
from lingvo_gshard.train.config import RunConfig, TPUConfig


def test_numbers_below_one():
    with pytest.raises(ValueError, match="iterations_per_loop must be 1 or more, got 0"):
        TPUConfig(iterations_per_loop=0)
    with pytest.raises(ValueError, match="keep_checkpoint_max must be 1 or more, got -1"):
        RunConfig("d", TPUConfig(), keep_checkpoint_max=-1)
    with pytest.raises(ValueError, match="seed must be an int32, got 2147483648"):
        RunConfig("d", TPUConfig(), seed=2**31)


def test_a_spec_without_what_its_mode_needs():
    with pytest.raises(ValueError, match="mode TRAIN needs train_op"):
        TPUEstimatorSpec(ModeKeys.TRAIN, loss=tf.constant(1.0))
    with pytest.raises(ValueError, match="mode EVAL needs eval_metrics"):
        TPUEstimatorSpec(ModeKeys.EVAL, eval_metrics={})
    with pytest.raises(ValueError, match="mode PREDICT needs predictions"):
        TPUEstimatorSpec(ModeKeys.PREDICT)
    TPUEstimatorSpec(ModeKeys.PREDICT, predictions=NestedMap(y=tf.constant(1.0)))
