"""Training in two processes, each with its rows of a batch: the same as in one, resumed by either,
begun from another run; and one of them dies."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gshard.checkpoints import exported
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.spmd.processes import EXIT_STATUS
from lingvo_gshard.train.hooks import TrainHook
from tests import exhaustive, ports
from tests.train import regression


class _Losses(TrainHook):
    def __init__(self):
        self.losses = []

    def after_call(self, call):
        self.losses += call.metrics.loss.tolist()


def _train_here(folder, max_steps, num_rows=regression.B, **options):
    losses = _Losses()
    estimator = regression.make(folder, 4, steps_per_call=2, **options)
    estimator.train(
        lambda p: regression.Batches(num_rows=num_rows), max_steps=max_steps, hooks=[losses]
    )
    return losses.losses


def _error_here(folder):
    estimator = regression.make(folder, 4)
    return estimator.evaluate(lambda p: regression.Batches(num_batches=3))["error"]


def _start(folder, max_steps, dies_at=None, dying=1, num_rows=None):
    """Starts two processes that train; process `dying` kills itself at step `dies_at`.

    With `num_rows`, batches have that many rows, and weights are split unevenly.
    """
    coordinator = f"127.0.0.1:{ports.free()}"
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.train.process", str(folder), coordinator, "2"]
    dies = [] if dies_at is None else [str(dies_at)]
    uneven = [] if num_rows is None else ["-1", str(num_rows)]
    return [
        subprocess.Popen(
            [*command, str(i), str(max_steps), *(dies if i == dying else []), *uneven],
            env=keep,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def _results_of(processes):
    """Returns (losses, error), the last output of both; fails if a process fails."""
    try:
        done = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [err for _, err in done]
    printed = [json.loads(out.splitlines()[-1]) for out, _ in done]
    assert printed[0] == printed[1]
    return printed[0]["losses"], printed[0]["error"]


def _check_exported(folder, step):
    """Checks the export of two processes, which is in parts."""
    weights = exported.read(folder / "weights.safetensors.index.json")
    with Checkpoints(folder) as saved:
        wanted = saved.arrays(step)
    assert sorted(weights) == ["theta.bias_V", "theta.w_HV"]
    for name, array in weights.items():
        np.testing.assert_array_equal(array[()], wanted[name][()], err_msg=name)


@pytest.mark.slow
def test_one_then_two_then_one_process_train_as_one(tmp_path):
    whole = _train_here(tmp_path / "whole", 10)
    first = _train_here(tmp_path / "shared", 2)
    both, error = _results_of(_start(tmp_path / "shared", 6))
    # A sum across processes is taken in another order.
    np.testing.assert_allclose(error, _error_here(tmp_path / "shared"), rtol=1e-5)
    _check_exported(tmp_path / "shared", 6)
    last = _train_here(tmp_path / "shared", 10)
    np.testing.assert_allclose([*first, *both, *last], whole, rtol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "shared/train_metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    saved = tmp_path / "shared/checkpoints/6/state"
    assert all((saved / f"ocdbt.process_{i}").is_dir() for i in (0, 1))


@pytest.mark.slow
def test_rows_and_weights_that_two_processes_do_not_divide(tmp_path):
    """10 rows and V = 3 over 4 devices: each process reads all rows, and holds its own parts."""
    whole = _train_here(tmp_path / "whole", 8, num_rows=10)
    first = _train_here(tmp_path / "shared", 4, num_rows=10, partitioning=regression.uneven(2))
    both, error = _results_of(_start(tmp_path / "shared", 6, num_rows=10))
    last = _train_here(tmp_path / "shared", 8, num_rows=10)
    np.testing.assert_allclose([*first, *both, *last], whole, rtol=1e-5)
    assert error > 0
    _check_exported(tmp_path / "shared", 6)


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, *exhaustive.only(1)])
def test_when_one_process_dies_the_other_ends_and_a_restart_continues(tmp_path, dying):
    processes = _start(tmp_path / "shared", 10**6, dies_at=6, dying=dying)
    _, error = processes[dying].communicate(timeout=120)
    assert processes[dying].returncode == -signal.SIGKILL, error
    died = time.monotonic()
    _, said = processes[1 - dying].communicate(timeout=120)
    assert time.monotonic() - died < 5
    assert processes[1 - dying].returncode == EXIT_STATUS
    assert f"Process {1 - dying} ends: process {dying} has died. Start all of them again." in said

    whole = _train_here(tmp_path / "whole", 10)
    again, *_ = _results_of(_start(tmp_path / "shared", 10))
    assert len(again) in (6, 10)  # From the checkpoint of step 4, if that was complete.
    np.testing.assert_allclose(again, whole[-len(again) :], rtol=1e-5)
