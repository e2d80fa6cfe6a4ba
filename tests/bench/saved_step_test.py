"""A train step saved by one process runs in another one, which cannot import TensorFlow."""

import os
import re
import subprocess
import sys

import pytest

_WITHOUT_TENSORFLOW = """
import runpy, sys
sys.modules["tensorflow"] = None  # Makes any import of it fail.
runpy.run_module("bench.saved_step", run_name="__main__", alter_sys=True)
"""


def _python(*args: str) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_learns_without_tensorflow(tmp_path):
    small = ["--model=toy.MoE8E4L", "--batch_size=8", "--steps_per_call=5"]
    _python("-m", "bench.saved_step", f"--make={tmp_path}", *small)
    printed = _python("-c", _WITHOUT_TENSORFLOW, f"--run={tmp_path}", "--calls=2")
    found = re.search(r"^([\d.]+) steps/s; loss ([\d.]+) at first, ([\d.]+) at 15$", printed, re.M)
    assert found, printed
    rate, first, last = map(float, found.groups())
    assert rate > 0 and last < 0.95 * first
