"""What the result of a model_fn must hold."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec


@pytest.mark.parametrize(
    ("mode", "fields", "missing"),
    [
        (Mode.TRAIN, {}, "loss, train_op"),
        (Mode.TRAIN, {"loss": tf.constant(1.0)}, "train_op"),
        (Mode.EVAL, {}, "eval_metrics"),
        (Mode.EVAL, {"eval_metrics": {}}, "eval_metrics"),
        (Mode.PREDICT, {"predictions": NestedMap()}, "predictions"),
    ],
)
def test_what_the_mode_requires_is_missed(mode, fields, missing):
    with pytest.raises(ValueError, match=f"^TPUEstimatorSpec: mode {mode.name} needs {missing}.$"):
        TPUEstimatorSpec(mode, **fields)


def test_what_other_modes_require_may_be_missing():
    predictions = NestedMap(y=tf.constant(1.0))
    assert TPUEstimatorSpec(Mode.PREDICT, predictions=predictions).loss is None
