"""The calls of hooks, the progress bar, and the policies for a loss that is not a number."""

import logging
import re
import signal
import threading

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train import hooks
from lingvo_gshard.train.hooks import (
    NonFinite,
    NonFiniteHook,
    NonFiniteLossError,
    ProgressHook,
    TrainCall,
    joined,
)
from xla_spmd.runtime import progress


def _call(step, losses, secs, tokens):
    metrics = NestedMap(loss=np.float32(losses), num_tokens=np.float32(tokens))
    return TrainCall(step, len(losses), metrics, secs)


def test_speeds_and_means():
    call = _call(7, [3.0, 5.0], 0.5, [100.0, 300.0])
    assert (call.steps_per_sec, call.tokens_per_sec) == (4.0, 800.0)
    assert call.mean().loss == 4.0
    assert TrainCall(1, 1, NestedMap(loss=np.float32([1])), 1.0).tokens_per_sec is None


def test_joined_calls_weigh_every_step_alike():
    both = joined([_call(3, [1.0, 2.0, 3.0], 1.0, [1, 1, 1]), _call(4, [10.0], 2.0, [9])])
    assert (both.step, both.num_steps, both.secs) == (4, 4, 3.0)
    assert both.mean().loss == 4.0 and both.tokens_per_sec == 4.0


@pytest.mark.parametrize(
    ("step", "num_steps", "reached"), [(4, 1, True), (5, 1, False), (11, 8, True), (3, 3, False)]
)
def test_reaches_multiple_of_four(step, num_steps, reached):
    assert _call(step, [0.0] * num_steps, 1.0, [0] * num_steps).reaches_multiple_of(4) == reached


def test_the_bar_shows_loss_and_speed(monkeypatch, capsys):
    monkeypatch.setenv("LINGVO_GSHARD_PROGRESS", "on")
    monkeypatch.setattr(progress, "_QUIET_SECS", 0.0)
    bar = ProgressHook(max_steps=8)
    bar.begin(2)
    bar.after_call(_call(4, [3.0, 2.5], 0.5, [100, 200]))
    bar.end()
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"training: 4/8 steps, 00:00 so far, .* left, ", last)
    assert last.endswith(", loss=2.5000, steps/s=4.00, tokens/s=600")


def _nonfinite_call(losses, **metrics):
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
        hook.after_call(_nonfinite_call([1.0, 2.0, nan, nan], activation_norms=norms))


def test_a_non_finite_loss_before_the_first_save():
    hook = NonFiniteHook(NonFinite.STOP)
    hook.begin(0)
    with pytest.raises(NonFiniteLossError, match="loss of step 12 is nan; nothing was saved.$"):
        hook.after_call(_nonfinite_call([1.0, np.nan]))


def test_only_the_gradients_may_be_bad():
    metrics = {
        "activation_norms": _norms(encoder_0=[1, 1]),
        "gradient_norms": _norms(encoder_0=[1, np.inf]),
        "skipped": np.float32([0, 1]),
    }
    with pytest.raises(NonFiniteLossError, match=r"step 12 is 3.0, first in encoder_0 \(gradient"):
        NonFiniteHook(NonFinite.STOP).after_call(_nonfinite_call([2.0, 3.0], **metrics))


def test_skipped_steps_are_counted(caplog):
    hook = NonFiniteHook(NonFinite.SKIP)
    with caplog.at_level(logging.WARNING):
        hook.after_call(_nonfinite_call([1.0, np.nan], skipped=np.float32([0, 1])))
        hook.after_call(_nonfinite_call([1.0, 1.0], skipped=np.float32([0, 0])))
        hook.after_call(_nonfinite_call([np.inf, np.nan], skipped=np.float32([1, 1])))
    assert [record.getMessage() for record in caplog.records] == [
        "The loss of step 12 is nan; skipped, 1 steps in this run so far.",
        "The loss of step 11 is inf; skipped, 3 steps in this run so far.",
    ]


def test_skip_needs_a_model_that_skips():
    with pytest.raises(ValueError, match="model_fn must leave the state unchanged and set its"):
        NonFiniteHook(NonFinite.SKIP).after_call(_nonfinite_call([np.nan]))


def test_signals_are_not_handled_in_another_thread():
    handlers = []

    def train():
        with hooks.StopOnSignal() as stop:
            handlers.append((signal.getsignal(signal.SIGINT), stop.wants_to_stop()))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert handlers == [(before, False)]
