"""Plans that are kept, and the processes that make them."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import pytest

from lingvo_gshard import registry
from lingvo_gshard.planning import plan, plan_store
from lingvo_gshard.planning.planner import Request
from tests.planning import plans

_ROOT = pathlib.Path(__file__).parents[2]
_KILLED = """
import concurrent.futures, multiprocessing, os, time
from lingvo_gshard.planning import plan_store
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(1, context, plan_store._end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    os.kill(os.getpid(), 9)
"""


_REQUEST = Request("toy.MoE8E4L", (), registry.get_params("toy.MoE8E4L"), "v3:2x2")


@pytest.fixture
def made(monkeypatch):
    """What was asked of processes, each of which makes a plan at once."""
    asked = []

    def make(request):
        asked.append(request)
        return plans.plan(plans.cost(), settings=request.settings)

    monkeypatch.setattr(plan_store, "_in_own_process", make)
    return asked


def test_a_plan_is_made_once(made, tmp_path):
    first = plan_store.planned(_REQUEST, tmp_path)
    assert plan_store.planned(_REQUEST, tmp_path) == first == plan.load(tmp_path)
    assert len(made) == 1
    params = _REQUEST.params.Copy().Set(**{"input.batch_size": 64})
    other = dataclasses.replace(_REQUEST, params=params)
    plan_store.planned(other, tmp_path)
    plan_store.planned(dataclasses.replace(other, topology="v3:4x4"), tmp_path)
    assert len(made) == 3


def test_a_plan_that_was_killed_is_made_again_and_others_are_kept(made, monkeypatch, tmp_path):
    plan_store.planned(_REQUEST, tmp_path / "first")

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(plan, "save", killed)
        plan_store.planned(_REQUEST, tmp_path / "second")
    plan_store.planned(_REQUEST, tmp_path / "first")
    assert len(made) == 2
    plan_store.planned(_REQUEST, tmp_path / "second")
    assert len(made) == 3


def _runs(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return found.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.slow
def test_what_makes_a_plan_ends_with_who_asked_for_it(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    run = subprocess.run(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )
    assert run.returncode == -9
    pid, deadline = int(run.stdout), time.monotonic() + 60
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _runs(pid)
