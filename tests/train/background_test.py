"""Hooks beside training: all calls in order, errors told, nothing waited for but the end."""

import threading

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.background import BackgroundHook
from lingvo_gshard.train.hooks import TrainCall, TrainHook


def _call(step):
    return TrainCall(step, 1, NestedMap(loss=np.float32([1.0])), secs=1.0)


class _Slow(TrainHook):
    """Waits, in each call, until it may go on."""

    def __init__(self):
        self.may, self.seen, self.ended = threading.Semaphore(0), [], False

    def after_call(self, call):
        self.may.acquire()
        self.seen.append((call.step, threading.current_thread().name))

    def end(self):
        self.ended = True


def test_training_does_not_wait_but_at_the_end():
    slow = _Slow()
    hook = BackgroundHook(slow)
    hook.begin(0)
    for step in range(1, 5):
        hook.after_call(_call(step))
    assert slow.seen == []
    slow.may.release(4)
    hook.end()
    assert slow.seen == [(step, "background_hook") for step in range(1, 5)] and slow.ended


class _Failing(TrainHook):
    def __init__(self):
        self.calls = 0

    def after_call(self, call):
        self.calls += 1
        raise OSError("No space left on device")


def test_an_error_reaches_the_training_thread_once():
    failing = _Failing()
    hook = BackgroundHook(failing)
    hook.begin(0)
    hook.after_call(_call(1))
    with pytest.raises(OSError, match="No space left"):
        hook.end()
    assert failing.calls == 1
