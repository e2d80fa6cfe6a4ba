import contextlib
import functools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from data_prep import config as config_file
from data_prep import deduplication, engines, pipeline, runs, tsv, tsv_folder
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from tests import ports
from tests.data_prep import prepared

_CONFIG = BuildConfig(source_vocab_size=500, target_vocab_size=450, pairs_per_chunk=40)


def _fail(path: pathlib.Path) -> None:
    raise OSError(5, "input/output error", str(path))


@pytest.mark.slow
@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:PORT"])
def test_a_scheduler_that_does_not_answer_is_named(tmp_path, address):
    pytest.importorskip("dask")
    (tmp_path / "train").mkdir()
    (tmp_path / "train/de-en.tsv").write_text("ja\tyes\n")
    address = address.replace("PORT", str(ports.free()))
    flags = [f"--input={tmp_path}", f"--out={tmp_path}/out", "--engine=dask"]
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.build", *flags, f"--scheduler={address}"],
        env=os.environ | {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "0.2s"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    reason = "0.2 s" if ":" in address else "missing port"
    assert f"no Dask scheduler answers at {address}: " in done.stderr and reason in done.stderr


def test_a_missing_dask_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(
        ValueError, match=r"--engine=dask needs Dask: pip install 'lingvo_gshard\[dask\]'"
    ):
        engines.dask(None, 1).__enter__()


@contextlib.contextmanager
def _started(module, *flags):
    """A Dask process in its own process group."""
    command = [sys.executable, "-m", f"distributed.cli.{module}", *flags]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path):
    """The address and the process of a scheduler, and its three workers' processes."""
    distributed = pytest.importorskip("distributed")
    path, options = tmp_path / "scheduler.json", ("--no-dashboard", "--host=127.0.0.1")
    with contextlib.ExitStack() as stack:
        start = [f"--scheduler-file={path}", "--port=0"]
        scheduler = stack.enter_context(_started("dask_scheduler", *start, *options))
        worker = [f"--scheduler-file={path}", "--nthreads=1", "--no-nanny"]
        worker += [f"--local-directory={tmp_path}/scratch"]
        workers = [
            stack.enter_context(_started("dask_worker", *worker, *options)) for _ in range(3)
        ]
        with distributed.Client(scheduler_file=str(path)) as client:
            client.wait_for_workers(3, timeout=60)
            address = client.scheduler.address
        yield address, scheduler, workers


def _write_text(folder):
    for i, code in enumerate(("de", "fr", "cs", "sv", "pl")):
        pairs = [Pair(f"{code} Satz {j % 170} hier", f"sentence {j} here") for j in range(200 + i)]
        path = folder / f"{code}-en.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(pair.line for pair in pairs))


def _build(address, text, data):
    tsv.BYTES_PER_SPAN = 1500
    deduplication._PAIRS_PER_GROUP = 100
    with engines.dask(address, 1) as engine:
        pipeline.run_through(
            pipeline.Step.REPORT, tsv_folder.sources_in(text), data, _CONFIG, engine
        )


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_driver_change_nothing(cluster, tmp_path):
    address, _, workers = cluster
    _write_text(tmp_path / "text")
    results = tmp_path / "data" / ".unfinished" / "results-4"
    context = multiprocessing.get_context("spawn")
    begin = functools.partial(
        context.Process, target=_build, args=(address, tmp_path / "text", tmp_path / "data")
    )

    def started_until(pattern):
        process = begin()
        process.start()
        while not list(results.glob(pattern)):
            assert process.exitcode is None
            time.sleep(0.005)
        return process

    driver = started_until("clean-*.result")
    driver.kill()
    driver.join()
    assert driver.exitcode == -signal.SIGKILL
    assert not list(results.glob("select-*.result"))
    driver = started_until("records-*.result")
    workers[0].kill()
    driver.join()
    assert driver.exitcode == 0
    prepared.build(tmp_path / "text", tmp_path / "here", _CONFIG)
    assert _contents(tmp_path / "data") == _contents(tmp_path / "here")


@pytest.mark.slow
def test_a_killed_scheduler_is_one_line_and_the_build_continues_elsewhere(cluster, tmp_path):
    address, scheduler, _ = cluster
    _write_text(tmp_path / "text")
    config = tmp_path / "data.toml"
    sizes = "source_vocab_size = 500\ntarget_vocab_size = 450\npairs_per_chunk = 40"
    config.write_text(f"{sizes}\n[[sources]]\nformat = 'folder'\npath = 'text'\n")
    command = [sys.executable, "-m", "data_prep.build", f"--config={config}"]
    command += [f"--out={tmp_path}/data", "--engine=dask", f"--scheduler={address}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    results = tmp_path / "data" / ".unfinished" / "results-4"
    while not list(results.glob("clean-*.result")):
        assert driver.poll() is None
        time.sleep(0.005)
    scheduler.kill()
    _, told = driver.communicate(timeout=60)
    assert driver.returncode == 1
    expected = f"data_prep.build: the Dask scheduler at {address} no longer answers; repeat the"
    assert told.splitlines()[-1].startswith(expected)
    assert "Traceback" not in told, told
    done = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    prepared.build(tmp_path / "text", tmp_path / "here", _CONFIG)
    found, made = config_file.load(config, {})
    seen = {}

    def engine(calls):
        seen.update({path: path.stat().st_mtime_ns for path in results.iterdir()})
        yield from engines.pool(1)(calls)

    pipeline.run_through(pipeline.Step.REPORT, found, tmp_path / "data", made, engine)
    assert {path: seen[path] for path in done} == done
    assert _contents(tmp_path / "data") == _contents(tmp_path / "here")


@pytest.mark.slow
def test_local_workers_of_dask_and_what_a_task_raises(tmp_path):
    pytest.importorskip("distributed")
    with engines.dask(None, 2) as engine:
        run = functools.partial(runs.run_tasks, tmp_path / "results", engine)
        pids = run("one", {i: os.getpid for i in range(4)})
        assert os.getpid() not in pids.values()
        with pytest.raises(OSError, match=r"input/output error: '/a/b'"):
            run("two", {i: functools.partial(_fail, pathlib.Path("/a/b")) for i in range(3)})
    run = functools.partial(runs.run_tasks, tmp_path / "results", engines.pool(1))
    assert run("one", {i: os.getpid for i in range(4)}) == pids


def test_a_worker_that_dies_is_reported():
    calls = [functools.partial(os._exit, 9)] * 2
    with pytest.raises(ValueError, match=r"a worker has died, .* with fewer --workers"):
        list(engines.pool(2)(calls))
