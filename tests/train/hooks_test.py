"""What hooks are given, and what the bar shows."""

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.hooks import ProgressHook, TrainCall, joined


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
    ("step", "num_steps", "reached"),
    [(4, 1, True), (5, 1, False), (5, 2, True), (7, 3, False), (11, 8, True), (3, 3, False)],
)
def test_reaches_multiple_of_four(step, num_steps, reached):
    assert _call(step, [0.0] * num_steps, 1.0, [0] * num_steps).reaches_multiple_of(4) == reached


def test_the_bar_shows_loss_and_speed(capsys):
    bar = ProgressHook(max_steps=8)
    bar.begin(2)
    bar.after_call(_call(4, [3.0, 2.5], 0.5, [100, 200]))
    bar.end()
    shown = capsys.readouterr().err
    assert "4/8" in shown and "loss=2.5000, steps/s=4.00, tokens/s=600" in shown
