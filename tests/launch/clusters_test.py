"""Two processes under Slurm or Open MPI train like two with a given coordinator.

One node, two processes of two CPU devices each; the states at the end are equal bit for bit.
"""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from data_prep import pipeline, tsv
from tests import quick_machine_code
from tests.data_prep import prepared
from tests.launch import one_node_slurm
from tools.disturbed_run import Layout, Run

pytestmark = pytest.mark.slow

_ROOT = pathlib.Path(__file__).parents[2]
_STEPS = 16
_SETTINGS = (
    "task.dim=16",
    "task.encoder.num_layers=2",
    "task.decoder.num_layers=2",
    "task.encoder.moe.group_size=32",
    "task.decoder.moe.group_size=32",
    "input.batch_size=8",
    "input.source_len=32",
    "input.target_len=32",
    "train.iterations_per_loop=2",
    f"train.max_steps={_STEPS}",
)


@pytest.fixture(scope="module", autouse=True)
def _installed():
    done = subprocess.run([_ROOT / "tools/setup_clusters.sh"], capture_output=True, text=True)
    if done.returncode or os.getuid() != 0:
        pytest.skip(f"needs root, Slurm and Open MPI: {done.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The trainer's flags, with data of two languages."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ("bake", "limo", "nutra", "stekon", "kono")
    for language, count in {"aa": 160, "br": 40}.items():
        pairs = [
            tsv.Pair(f"{language} {words[i % 5]} {i}", f"{words[i % 3]} {i}") for i in range(count)
        ]
        tsv.write(folder / f"text/train/{language}-en.tsv.gz", pairs)
        tsv.write(folder / f"text/dev/{language}-en.tsv.gz", pairs[:2])
    sizes = pipeline.BuildConfig(source_vocab_size=320, target_vocab_size=300)
    prepared.build(folder / "text", folder / "data", sizes)
    settings = tuple(f"--set={setting}" for setting in _SETTINGS)
    return ("--platform=cpu", "--model=toy.MoE8E4L", f"--data_dir={folder}/data", *settings)


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """The trainers don't inherit this process's devices; they share a cache of programs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith(("JAX_", "XLA_FLAGS", "PJRT_")):
                patch.delenv(name)
        patch.setenv("XLA_FLAGS", quick_machine_code.FLAGS)
        patch.setenv("LINGVO_GSHARD_COMPILATION_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", str(_ROOT))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, flags):
    """An undisturbed run of two processes that were given each other's address."""
    run = Run(tmp_path_factory.mktemp("whole") / "run", flags)
    assert [process.wait(timeout=600) for process in run.start(Layout(4, 2))] == [0, 0]
    return run


@pytest.fixture
def slurm(tmp_path):
    """The environment of a Slurm cluster's commands."""
    (tmp_path / "slurm").mkdir()
    with one_node_slurm.running(tmp_path / "slurm") as env:
        yield {**env, "PYTHON": sys.executable}


def _trainer_flags(run):
    return ["--mode=train", "--num_partitions=4", f"--logdir={run.folder}", *run.trainer_flags]


def _submit(run, env):
    """Submits launch/slurm.sbatch for two processes and returns the job's number."""
    command = ["sbatch", "--parsable", "--ntasks=2", "--ntasks-per-node=2"]
    command += [f"--output={run.folder}.log", str(_ROOT / "launch/slurm.sbatch")]
    done = subprocess.run(
        [*command, *_trainer_flags(run)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def _assert_equal(run, whole):
    assert run.losses() == whole.losses() and max(run.losses()) == _STEPS
    assert run.fingerprints() == whole.fingerprints()


@pytest.mark.exhaustive
def test_a_job_of_slurm_is_stopped_and_continues(tmp_path, flags, slurm, whole):
    """The batch script gets SIGTERM, as before the time limit."""
    run = Run(tmp_path / "run", flags)
    log = run.folder.with_suffix(".log")
    job = _submit(run, slurm)
    _wait_for_step(run, 6, log)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job], env=slurm, check=True)
    ends = ("COMPLETED", "FAILED", "CANCELLED")
    description = one_node_slurm.wait_for_state(job, ends, slurm, secs=600)
    assert "JobState=COMPLETED " in description, description + log.read_text()
    assert "ended with status 75 after 0 restarts" in log.read_text()
    assert "ended with status 0 after 1 restarts" in log.read_text()
    _assert_equal(run, whole)


@pytest.mark.exhaustive
def test_under_open_mpi_processes_find_each_other(tmp_path, flags, whole):
    run = Run(tmp_path / "run", flags)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    command += [sys.executable, "-m", "lingvo_gshard.trainer", "--cluster=auto"]
    done = subprocess.run(
        [*command, *_trainer_flags(run)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    _assert_equal(run, whole)


def _wait_for_step(run, step, log):
    end = time.monotonic() + 600
    while max(run.losses(), default=0) < step:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
