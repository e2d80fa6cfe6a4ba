"""What takes minutes: a model that learns the constructed languages, and one that is killed."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from data_prep import constructed, pipeline
from lingvo_gshard.evaluation import decode_split
from lingvo_gshard.spmd import specs
from lingvo_gshard.train import modes, run
from lingvo_gshard.train.checkpoints import Checkpoints
from lingvo_gshard.train.run import Launch
from lingvo_gshard.train.summaries import read_lines

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).parent.parent
_STEPS = 60


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("constructed")
    constructed.write_corpus(folder / "text", seed=3)
    config = pipeline.BuildConfig(source_vocab_size=4000, target_vocab_size=1500)
    pipeline.build(folder / "text", folder / "data", config)
    return str(folder / "data")


def _run(launch, logdir, num_partitions):
    return run.open_run(launch, str(logdir), num_partitions)


def test_the_demo_model_learns_to_translate(data_dir, tmp_path):
    """500 of the demo's 2000 steps; the frequencies of English words leave 5 nats a token."""
    overrides = (
        "train.max_steps=500",
        "optimizer.schedule.total_steps=500",
        "optimizer.schedule.cool_down_steps=250",
        "decode.max_sentences=20",
    )
    demo = _run(run.launch_of("toy.MoE8E4L", overrides, data_dir, str(tmp_path)), tmp_path, 4)
    modes.train_and_eval(demo)
    evaluation = json.loads((tmp_path / "eval_metrics.jsonl").read_text().splitlines()[-1])
    assert evaluation["step"] == 500
    assert evaluation["nll"] < 3.0
    decode_split.decode_split(demo, "test")
    report = json.loads((tmp_path / "decode_test" / "scores.json").read_text())
    assert len(report["languages"]) == 14
    assert report["languages"][0]["bleu"]["value"] > 5  # Of the largest language.
    lines = [json.loads(line) for line in (tmp_path / "train_metrics.jsonl").open()]
    assert lines[-1]["metrics"]["routing.overflow.encoder_1"] < 0.02


def _launch_to_train(data_dir):
    overrides = ("train.iterations_per_loop=5", "train.save_checkpoints_steps=10")
    overrides += (f"train.max_steps={_STEPS}",)
    return Launch("toy.MoE8E4L", overrides, data_dir, run.data_facts(data_dir))


def _train_process(launch, logdir):
    flags = [f"--set={override}" for override in launch.overrides]
    command = [sys.executable, "-m", "lingvo_gshard.trainer", "--mode=train", *flags]
    command += [f"--model={launch.model}", f"--data_dir={launch.data_dir}", f"--logdir={logdir}"]
    return subprocess.Popen(
        [*command, "--num_partitions=2"],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _last_state(launch, logdir):
    estimator = _run(launch, logdir, 2).estimator
    mesh = specs.device_mesh(estimator.partitioning)
    shardings = specs.shardings(estimator.partitioning, estimator.state_spec, mesh)
    with Checkpoints(logdir) as checkpoints:
        assert checkpoints.latest() == _STEPS
        state = checkpoints.restore(_STEPS, estimator.state_spec, shardings).state
    return {path: np.asarray(array) for path, array in state.FlattenItems()}


def _kill_at(process, logdir, step):
    """Kills the process once its log says that `step` is done: in the next call, or in a save."""
    log = logdir / "train_metrics.jsonl"
    while not (log.exists() and any(line["step"] >= step for line in read_lines(log))):
        assert process.poll() is None, "it ended before it was to be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_again_and_again_it_ends_as_if_never_stopped(data_dir, tmp_path):
    launch, killed = _launch_to_train(data_dir), tmp_path / "killed"
    assert _train_process(launch, tmp_path / "whole").wait() == 0

    rng = random.Random(7)
    for earliest in (5, 20, 35):
        process = _train_process(launch, killed)
        _kill_at(process, killed, earliest + rng.randrange(10))
        assert process.returncode == -signal.SIGKILL
    assert _train_process(launch, killed).wait() == 0

    whole = _last_state(launch, tmp_path / "whole")
    for path, array in _last_state(launch, killed).items():
        np.testing.assert_array_equal(array, whole[path], err_msg=path)
