"""The train program of K steps: its collectives, its memory, its contract."""

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model.spec import Mode, TPUEstimatorSpec
from lingvo_gshard.train.programs import Programs
from lingvo_gshard.train.user_model import UserModel
from tests.train import regression
from tests.train.regression import STATE, batch_specs


def _programs(model_fn, parts):
    params = regression.model_params()
    return Programs(UserModel(model_fn, None, lambda mode: params, parts, STATE))


def _executable(num_steps, parts):
    return _programs(regression.model_fn, parts).get(Mode.TRAIN, batch_specs(), num_steps)


@pytest.mark.slow
def test_the_loop_adds_no_collectives(tmp_path):
    parts = regression.make(tmp_path, 4).partitioning
    once, looped = _executable(1, parts).report(), _executable(5, parts).report()
    # A loop's body counts once.
    assert once.collectives == looped.collectives
    assert once.count("all-reduce") >= 1
    # The state is updated in place: step, and a quarter of the weights and momenta.
    shard_bytes = 4 * (1 + 2 * (regression.V + regression.H * regression.V // 4))
    assert once.alias_bytes == looped.alias_bytes == shard_bytes


def test_every_steps_metrics_come_back(tmp_path):
    parts = regression.make(tmp_path, 2).partitioning
    batches = [regression.Batches().batch(i) for i in range(3)]
    leaves = zip(*(batch.Flatten() for batch in batches), strict=True)
    stacked = batches[0].Pack(np.stack(leaf) for leaf in leaves)
    zeros = STATE.Transform(lambda spec: np.zeros(spec.shape, spec.dtype))
    result = _executable(3, parts)(zeros, stacked)
    assert int(result.state.step) == 3
    assert {path: x.shape for path, x in result.metrics.FlattenItems()} == {
        "loss": (3,),
        "mean_V": (3, regression.V),
        "num_tokens": (3,),
    }
    # All weights are zero before the first step: it predicts zeros.
    np.testing.assert_allclose(
        result.metrics.loss[0], np.mean(batches[0].labels.y_BV ** 2), rtol=1e-5
    )
    np.testing.assert_array_equal(result.metrics.mean_V[0], np.zeros(regression.V))
    assert np.all(result.metrics.mean_V[1] != 0)


def test_a_spec_of_another_mode_is_refused(tmp_path):
    def confused(state, features, labels, mode, params):
        return TPUEstimatorSpec(Mode.PREDICT, predictions=features)

    parts = regression.make(tmp_path, 2).partitioning
    with pytest.raises(ValueError, match="called with mode EVAL, returned PREDICT"):
        _programs(confused, parts).exported(Mode.EVAL, batch_specs())


def test_a_step_that_changes_the_states_shape_is_refused(tmp_path):
    def grows(state, features, labels, mode, params):
        spec = regression.model_fn(state, features, labels, mode, params)
        momentum = NestedMap(state.momentum, extra=state.step)
        return TPUEstimatorSpec(mode, loss=spec.loss, train_op=NestedMap(state, momentum=momentum))

    parts = regression.make(tmp_path, 2).partitioning
    message = r"train_op differs from state_spec: momentum.extra is int32\[\], expected absent"
    with pytest.raises(ValueError, match=message):
        _programs(grows, parts).exported(Mode.TRAIN, batch_specs())
