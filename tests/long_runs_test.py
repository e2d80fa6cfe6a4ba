"""A run of several minutes that is killed repeatedly."""

import random
import signal
import time

import numpy as np
import pytest

from data_prep import constructed, pipeline
from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.runs import run
from lingvo_gshard.runs.launch import Launch
from lingvo_gshard.spmd import specs
from tests.data_prep import prepared
from tools.disturbed_run import Layout, Run

_STEPS = 40


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("constructed")
    constructed.write_corpus(folder / "text", seed=3)
    config = pipeline.BuildConfig(source_vocab_size=4000, target_vocab_size=1500)
    prepared.build(folder / "text", folder / "data", config)
    return str(folder / "data")


def _run(launch, logdir, num_partitions):
    return run.open_run(launch, str(logdir), num_partitions)


def _launch(data_dir):
    overrides = ("train.iterations_per_loop=5", "train.save_checkpoints_steps=10")
    overrides += (f"train.max_steps={_STEPS}", "input.batch_size=16")
    return Launch("toy.MoE8E4L", overrides, data_dir, TranslationInput.Facts(data_dir))


def _start_trainer(run):
    [process] = run.start(Layout(partitions=2))
    return process


def _last_state(launch, logdir):
    estimator = _run(launch, logdir, 2).estimator
    mesh = specs.device_mesh(estimator.partitioning)
    shardings = specs.shardings(estimator.partitioning, estimator.state_spec, mesh)
    with Checkpoints(logdir) as checkpoints:
        assert checkpoints.latest() == _STEPS
        state = checkpoints.restore(_STEPS, estimator.state_spec, shardings).state
    return {path: np.asarray(array) for path, array in state.FlattenItems()}


def _kill_after(process, run, step):
    """Kills the process once it has logged `step`, which is in the next call or in a save."""
    while max(run.losses(), default=0) < step:
        assert process.poll() is None, "the process ended before it was killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_is_killed_repeatedly_ends_in_the_same_state(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(tmp_path / "cache"))
    launch = _launch(data_dir)
    trainer_flags = (
        f"--model={launch.model}",
        f"--data_dir={launch.data_dir}",
        *(f"--set={override}" for override in launch.overrides),
    )
    whole, killed = (Run(tmp_path / name, trainer_flags) for name in ("whole", "killed"))
    assert _start_trainer(whole).wait() == 0

    rng = random.Random(7)
    for earliest in (5, 20):
        process = _start_trainer(killed)
        _kill_after(process, killed, earliest + rng.randrange(10))
        assert process.returncode == -signal.SIGKILL
    assert _start_trainer(killed).wait() == 0

    expected = _last_state(launch, whole.folder)
    for path, array in _last_state(launch, killed.folder).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)
