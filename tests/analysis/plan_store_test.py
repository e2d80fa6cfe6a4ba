"""Processes that make plans."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_KILLED = """
import concurrent.futures, multiprocessing, os, time
from lingvo_gshard.analysis import plan_store
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(1, context, plan_store._end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    os.kill(os.getpid(), 9)
"""


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
