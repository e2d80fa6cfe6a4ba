"""Benchmarks accept programs that were traced elsewhere: a GPU machine does not need TensorFlow."""

import os
import subprocess
import sys

import pytest

# The name of the tracing module is part of a cached program's key.
_RUN = """
import runpy, sys
if sys.argv.pop(1) == "without":
    sys.modules["tensorflow"] = None  # Makes any import of it fail.
sys.argv[0] = "decode"
runpy.run_module("bench.decode", run_name="__main__", alter_sys=True)
"""


def _lines(cache, tensorflow):
    small = "--decoders=flat,classic --partitions=1 --beams=2 --batches=2 --lengths=4 --secs=0"
    done = subprocess.run(
        [sys.executable, "-c", _RUN, tensorflow, *small.split()],
        env={**os.environ, "LINGVO_GSHARD_COMPILATION_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_decode_runs_with_kept_programs(tmp_path):
    first = _lines(tmp_path, "with")
    again = _lines(tmp_path, "without")
    assert again[0] == first[0]
    assert [line[3] for line in again[-2:]] == ["flat", "classic"]
    assert again[-1][-3:] == ["2", "of", "2"]  # The same ids.
