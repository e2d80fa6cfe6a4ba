import os
import pathlib
import subprocess
import sys
import time

_KILLED = """
import concurrent.futures, multiprocessing, os, time
from xla_spmd.files import child_process
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(1, context, child_process.end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    os.kill(os.getpid(), 9)
"""


def is_running(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return found.stdout.strip()[:1] not in ("", "Z")


def test_a_child_ends_with_its_parent(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    run = subprocess.run(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )
    assert run.returncode == -9
    pid, deadline = int(run.stdout), time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not is_running(pid)
