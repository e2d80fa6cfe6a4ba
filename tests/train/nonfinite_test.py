"""The policies for a loss that is no number."""

import logging

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.hooks import TrainCall
from lingvo_gshard.train.nonfinite import NonFinite, NonFiniteHook, NonFiniteLossError


def _call(losses, **metrics):
    metrics = NestedMap(loss=np.float32(losses), **metrics)
    return TrainCall(12, len(losses), metrics, secs=1.0)


def _norms(**layers):
    return NestedMap({name: np.float32(values) for name, values in layers.items()})


def test_stop_names_the_first_step_and_the_first_layer_of_each_stack():
    hook = NonFiniteHook(NonFinite.STOP)
    hook.begin(4)
    hook.after_save(8, NestedMap())
    nan, inf = np.nan, np.inf
    norms = _norms(
        decoder_0=[1, 1, nan, 1],
        encoder_10=[1, 1, nan, 1],
        encoder_2=[1, 1, inf, 1],
        encoder_1=[1, 1, 1, nan],
    )
    message = (
        r"loss of step 11 is nan, first in decoder_0 \(activation_norms\) and encoder_2 "
        r"\(activation_norms\); the last checkpoint is of step 8\."
    )
    with pytest.raises(NonFiniteLossError, match=message):
        hook.after_call(_call([1.0, 2.0, nan, nan], activation_norms=norms))


def test_gradients_alone_may_be_bad():
    metrics = {
        "activation_norms": _norms(encoder_0=[1, 1]),
        "gradient_norms": _norms(encoder_0=[1, np.inf]),
        "skipped": np.float32([0, 1]),
    }
    with pytest.raises(NonFiniteLossError, match=r"step 12 is 3.0, first in encoder_0 \(gradient"):
        NonFiniteHook(NonFinite.STOP).after_call(_call([2.0, 3.0], **metrics))


def test_skip_counts_and_goes_on(caplog):
    hook = NonFiniteHook(NonFinite.SKIP)
    with caplog.at_level(logging.WARNING):
        hook.after_call(_call([1.0, np.nan], skipped=np.float32([0, 1])))
        hook.after_call(_call([1.0, 1.0], skipped=np.float32([0, 0])))
        hook.after_call(_call([np.inf, np.nan], skipped=np.float32([1, 1])))
    assert [record.getMessage() for record in caplog.records] == [
        "The loss of step 12 is nan; skipped, 1 steps in this run so far.",
        "The loss of step 11 is inf; skipped, 3 steps in this run so far.",
    ]


def test_skip_needs_a_model_that_skips():
    with pytest.raises(ValueError, match="model_fn must leave the state unchanged and set its"):
        NonFiniteHook(NonFinite.SKIP).after_call(_call([np.nan]))
