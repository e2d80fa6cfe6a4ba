"""Two processes of two devices each compute what one process of four does."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import peers, processes, program
from tests.spmd import functions

# Loads the saved programs and runs each: the train step three times, on its own new weights.
_PROCESS = """
import json, sys
from lingvo_gshard.spmd import environment
environment.prepare(num_devices=2)
from lingvo_gshard.spmd import processes, peers, program
folder, coordinator, process_id = sys.argv[1:]
processes.initialize(processes.Processes(coordinator, 2, int(process_id), timeout_secs=60))
import jax, numpy as np
from tests.spmd import functions
assert len(jax.local_devices()) == 2
counts = {}
for name in ("moe", "sgd"):
    saved = program.load(f"{folder}/{name}")
    executable = saved.compile()
    weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(saved.args))
    before = weights.Transform(np.copy)
    result = executable(weights, batch)
    for a, b in zip(weights.Flatten(), before.Flatten(), strict=True):
        np.testing.assert_array_equal(a, b)  # Also a donated argument's numpy arrays.
    for _ in range(2 if name == "sgd" else 0):
        result = executable(result.weights, batch)
    whole = processes.to_host(result)
    np.savez(f"{folder}/{name}{process_id}.npz", **dict(whole.FlattenItems()))
    counts[name] = executable.report().collectives
print(json.dumps(counts))
"""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run_processes(folder: str) -> list[str]:
    """What each process prints; fails with what it says when one fails."""
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-c", _PROCESS, folder, f"127.0.0.1:{_free_port()}"]
    started = [
        subprocess.Popen(
            [*command, str(i)], env=keep, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        done = [process.communicate(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], [err[-2000:] for _, err in done]
    return [out for out, _ in done]


def test_two_processes_equal_one(tmp_path):
    parts = functions.partitioning(4)
    fns = {"moe": functions.moe_dispatch(parts), "sgd": functions.sgd_step()}
    programs = {name: program.export(fn, parts) for name, fn in fns.items()}
    for name, saved in programs.items():
        saved.save(tmp_path / name)
    counts = [json.loads(out.splitlines()[-1]) for out in _run_processes(str(tmp_path))]
    for name, saved in programs.items():
        executable = saved.compile()
        weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(saved.args))
        want = executable(weights, batch)
        for _ in range(2 if name == "sgd" else 0):
            want = executable(want.weights, batch)
        for i in range(2):
            got = np.load(tmp_path / f"{name}{i}.npz")
            assert sorted(got.files) == [path for path, _ in want.FlattenItems()]
            for path, leaf in want.FlattenItems():
                np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)
            assert dict(counts[i][name]) == dict(executable.report().collectives)
    assert dict(counts[0]["moe"])["all-to-all"] == 2


def test_to_host_gives_whole_arrays_in_one_process_too():
    parts = functions.partitioning(4)
    executable = program.export(functions.sgd_step(), parts).compile()
    batch = functions.randoms(executable.program.args[1], 1)
    back = processes.to_host(executable.place_arg("batch", batch))
    assert isinstance(back, NestedMap) and isinstance(back.x_BM, np.ndarray)
    np.testing.assert_array_equal(back.x_BM, batch.x_BM)


@pytest.mark.parametrize(
    ("coordinator", "process_id", "message"),
    [
        ("localhost", 0, "must be host:port, got 'localhost'"),
        (":80", 0, "must be host:port, got ':80'"),
        ("localhost:x", 0, "must be host:port, got 'localhost:x'"),
        ("localhost:80", 2, "process_id must be 0 to 1, got 2"),
        ("localhost:80", -1, "process_id must be 0 to 1, got -1"),
    ],
)
def test_a_place_that_is_none_is_refused(coordinator, process_id, message):
    with pytest.raises(ValueError, match=message):
        processes.Processes(coordinator, 2, process_id)


_ALONE = """
import sys
from lingvo_gshard.spmd import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes
coordinator, process_id = sys.argv[1:]
with processes.joined(processes.Processes(coordinator, 2, int(process_id), timeout_secs=2)):
    print("joined")
"""


@pytest.mark.parametrize("process_id", [0, 1])
def test_a_process_to_which_nobody_comes_says_so_and_ends(process_id):
    coordinator = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-c", _ALONE, coordinator, str(process_id)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (peers.EXIT_STATUS, "")
    assert (
        f"Process {process_id} ends: not all 2 processes came to {coordinator} within 2 s. Start "
        "all of them again."
    ) in done.stderr
