"""Training in two processes: the same as in one, resumed by either; and one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gshard.spmd import peers
from lingvo_gshard.train.hooks import TrainHook
from tests.train import regression


class _Losses(TrainHook):
    def __init__(self):
        self.losses = []

    def after_call(self, call):
        self.losses += call.metrics.loss.tolist()


def _train_here(folder, max_steps):
    losses = _Losses()
    estimator = regression.make(folder, 4, steps_per_call=2)
    estimator.train(lambda p: regression.Batches(), max_steps=max_steps, hooks=[losses])
    return losses.losses


def _start(folder, max_steps, dies_at=None, dying=1):
    """Two processes that train; process `dying` kills itself at step `dies_at`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.train.process", str(folder), coordinator, "2"]
    dies = [] if dies_at is None else [str(dies_at)]
    return [
        subprocess.Popen(
            [*command, str(i), str(max_steps), *(dies if i == dying else [])],
            env=keep,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def _losses_of(processes):
    """What each process printed last; fails with what it says when one fails."""
    try:
        done = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [err for _, err in done]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def test_one_then_two_then_one_process_train_as_one(tmp_path):
    whole = _train_here(tmp_path / "whole", 10)
    first = _train_here(tmp_path / "shared", 2)
    both = _losses_of(_start(tmp_path / "shared", 6))
    assert both[0] == both[1]
    last = _train_here(tmp_path / "shared", 10)
    # Across processes a sum is taken in another order.
    np.testing.assert_allclose([*first, *both[0], *last], whole, rtol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "shared/train_metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1])
def test_when_one_dies_the_other_ends_and_both_go_on_when_started_again(tmp_path, dying):
    processes = _start(tmp_path / "shared", 10**6, dies_at=6, dying=dying)
    assert processes[dying].wait(timeout=120) == -signal.SIGKILL
    died = time.monotonic()
    _, said = processes[1 - dying].communicate(timeout=120)
    assert time.monotonic() - died < 5
    assert processes[1 - dying].returncode == peers.EXIT_STATUS
    assert f"Process {1 - dying} ends: process {dying} has died. Start all of them again." in said

    whole = _train_here(tmp_path / "whole", 10)
    again = _losses_of(_start(tmp_path / "shared", 10))
    # From the checkpoint of step 4, if it was whole.
    assert again[0] == again[1] and len(again[0]) in (6, 10)
    np.testing.assert_allclose(again[0], whole[-len(again[0]) :], rtol=1e-5)
