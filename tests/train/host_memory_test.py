"""An export and a warm start need host memory for a few arrays, not for the whole state."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """See tests.train.host_memory, which runs in its own process."""
    folder = str(tmp_path_factory.mktemp("host_memory"))
    command = [sys.executable, "-m", "tests.train.host_memory", folder]
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    keep["MALLOC_MMAP_THRESHOLD_"] = "65536"  # Freed memory returns to the kernel at once.
    done = subprocess.run(command, env=keep, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["export", "run", "file"])
def test_a_few_arrays_at_a_time_are_in_memory(measured, what):
    """The array being read, the buffers for reading it, and its fingerprint's temporaries."""
    assert measured["state"] == 64 * measured["array"]
    assert measured[what] < 16 * measured["array"], measured
