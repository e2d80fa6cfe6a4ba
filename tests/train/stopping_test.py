"""SIGTERM and SIGINT: the current call is finished and saved; nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lingvo_gshard.checkpoints.saved_steps import whole_steps
from lingvo_gshard.train.estimator import EvalSpec
from lingvo_gshard.train.hooks import StopOnSignal, TrainHook
from lingvo_gshard.train.train_and_evaluate import train_and_evaluate
from tests.train import regression


class _SendsSigterm(TrainHook):
    def __init__(self, at_step):
        self._at_step, self.saved = at_step, []

    def begin(self, step):
        if step == self._at_step:
            os.kill(os.getpid(), signal.SIGTERM)

    def after_call(self, call):
        if call.step - call.num_steps < self._at_step <= call.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def after_save(self, step, state):
        self.saved.append(step)


def _train(folder, at_step=None, max_steps=12):
    """Trains, with a signal at a step; returns the step at which it stopped, and the saves."""
    before, sender = signal.getsignal(signal.SIGTERM), _SendsSigterm(at_step or -1)
    with StopOnSignal() as stop:
        estimator = regression.make(folder, steps_per_call=4, save_checkpoints_steps=8)
        estimator.train(lambda p: regression.Batches(), max_steps=max_steps, hooks=[sender, stop])
    assert signal.getsignal(signal.SIGTERM) is before
    return stop.stopped_at, sender.saved


def _losses(folder):
    lines = [json.loads(line) for line in (folder / "train_metrics.jsonl").open()]
    return {line["step"]: line["metrics"]["loss"] for line in lines}


@pytest.mark.slow
def test_a_restarted_training_equals_an_undisturbed_one(tmp_path):
    _train(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    # Hooks do not hear of the save at a stop, since an evaluation would take too long.
    assert _train(stopped, at_step=2) == (4, [])
    assert whole_steps(stopped) == [4]
    assert _train(stopped, at_step=4) == (4, [])  # Before the first call: nothing to save.
    assert _train(stopped, at_step=8) == (8, [])
    assert _train(stopped) == (None, [12])
    assert _losses(stopped) == _losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_stop_ends_train_and_evaluate_without_an_evaluation(tmp_path):
    estimator = regression.make(tmp_path, steps_per_call=2, save_checkpoints_steps=4)
    with StopOnSignal() as stop:
        evaluation = EvalSpec(lambda p: regression.Batches(num_batches=1))
        hooks = [stop, _SendsSigterm(6)]
        metrics = train_and_evaluate(
            estimator, lambda p: regression.Batches(), evaluation, max_steps=10, hooks=hooks
        )
        assert metrics is None
    assert stop.stopped_at == 6
    assert [json.loads(line)["step"] for line in (tmp_path / "eval_metrics.jsonl").open()] == [4]


class _SendsSigtermAsItEvaluates(TrainHook):
    def after_save(self, step, state):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_stop_during_an_evaluation_prevents_further_steps(tmp_path):
    estimator = regression.make(tmp_path, steps_per_call=2, save_checkpoints_steps=4)
    with StopOnSignal() as stop:
        hooks = [stop, _SendsSigtermAsItEvaluates()]
        estimator.train(lambda p: regression.Batches(), max_steps=10, hooks=hooks)
    assert stop.stopped_at == 4 and whole_steps(tmp_path) == [4]


_TWICE = """
import hashlib, os, signal, sys, threading, time
from lingvo_gshard.train.hooks import StopOnSignal

def sends():
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.wants_to_stop():
        time.sleep(0.01)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGINT)

with StopOnSignal() as stop:
    threading.Thread(target=sends).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # Minutes in which no Python runs here.
"""


def test_a_second_signal_ends_at_once_in_any_state_of_the_main_thread():
    done = subprocess.run(
        [sys.executable, "-c", _TWICE], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "goes on\n")
    assert (
        "SIGTERM: training stops after this call; a second signal ends it at once." in done.stderr
    )


def test_a_key_stops_it_as_sigterm_does():
    before = signal.getsignal(signal.SIGINT)
    with StopOnSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)  # No KeyboardInterrupt.
        for _ in range(1000):
            if stop.wants_to_stop():
                break
            time.sleep(0.01)
        assert stop.wants_to_stop()
    assert signal.getsignal(signal.SIGINT) is before
