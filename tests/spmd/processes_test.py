"""Two processes of two devices each equal one process of four; if one ends, both end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import lowering, processes
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.process_flags import Processes
from tests import ports
from tests.spmd import functions

# Loads and runs the saved programs: the train step three times, each time on its new weights.
_PROCESS = """
import json, sys
import numpy as np
from xla_spmd.runtime import environment
environment.prepare(num_devices=2)
from lingvo_gshard.spmd import devices, processes, program
from lingvo_gshard.spmd.executable import compile_program
folder, coordinator, process_id = sys.argv[1:]
def place_own_rows(executable, batch):
    own = batch.Transform(lambda x: np.split(x, 2)[int(process_id)])
    placed = processes.to_host(executable.place("batch", own))
    for a, b in zip(placed.Flatten(), batch.Flatten(), strict=True):
        np.testing.assert_array_equal(a, b)
    try:
        executable.place("batch", own.Transform(lambda x: x[:4]))
    except ValueError as error:
        expected = "[4, 7, 8, 3] given, float32[16, 7, 8, 3], or [8, 7, 8, 3], this process's share"
        assert expected in str(error), error
    else:
        raise AssertionError("Half of a share was taken.")
def run():
    import jax
    from tests.spmd import functions
    assert len(jax.local_devices()) == 2
    assert processes.num_on_host() == 2
    # All decide by the memory of process 0, which each of the four devices has a quarter of.
    environment.memory_bytes = lambda: (4 + 8 * int(process_id)) * 2**30
    assert devices.memory_bytes() == 2**30
    counts = {}
    for name in ("moe", "sgd"):
        saved = program.load(f"{folder}/{name}")
        executable = compile_program(saved)
        weights, batch = (functions.randoms(arg, seed) for seed, arg in enumerate(saved.args))
        before = weights.Transform(np.copy)
        if name == "moe":
            place_own_rows(executable, batch)
        result = executable(weights, batch)
        for a, b in zip(weights.Flatten(), before.Flatten(), strict=True):
            np.testing.assert_array_equal(a, b)  # Also a donated argument's numpy arrays.
        for _ in range(2 if name == "sgd" else 0):
            result = executable(result.weights, batch)
        whole = processes.to_host(result)
        np.savez(f"{folder}/{name}{process_id}.npz", **dict(whole.FlattenItems()))
        counts[name] = executable.report().collectives
    print(json.dumps(counts))
with processes.joined(processes.Processes(coordinator, 2, int(process_id), timeout_secs=60)):
    run()
"""


def _start(code: str, *args: str, count: int = 2) -> list[subprocess.Popen]:
    """Starts processes that run `code`, each with `args`, the coordinator and its number."""
    keep = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-c", code, *args, f"127.0.0.1:{ports.free()}"]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return [
        subprocess.Popen([*command, str(i)], env=keep, text=True, **pipes) for i in range(count)
    ]


def _finish(started: list[subprocess.Popen]) -> list[tuple[str, str]]:
    """Returns the standard output and standard error of each process."""
    try:
        return [process.communicate(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()


def _assert_ends(printed: list[tuple[str, str]], process: int, line: str) -> None:
    """Asserts that a process says once why it ends, whatever its libraries say after that."""
    err = printed[process][1]
    own = [each for each in err.splitlines() if each.startswith(f"Process {process} ")]
    assert own == [line], f"process {process}: {printed}"


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    parts = functions.partitioning(4)
    fns = {"moe": functions.moe_dispatch(parts), "sgd": functions.sgd_step()}
    programs = {name: lowering.export(fn, parts) for name, fn in fns.items()}
    for name, saved in programs.items():
        saved.save(tmp_path / name)
    started = _start(_PROCESS, str(tmp_path))
    printed = _finish(started)
    assert [process.returncode for process in started] == [0, 0], printed
    counts = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    for name, saved in programs.items():
        executable = compile_program(saved)
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
    executable = compile_program(lowering.export(functions.sgd_step(), parts))
    batch = functions.randoms(executable.program.args[1], 1)
    back = processes.to_host(executable.place("batch", batch))
    assert isinstance(back, NestedMap) and isinstance(back.x_BM, np.ndarray)
    np.testing.assert_array_equal(back.x_BM, batch.x_BM)


@pytest.mark.parametrize(
    ("coordinator", "process_id", "message"),
    [
        ("localhost", 0, "--coordinator=localhost: expected HOST:PORT"),
        (":80", 0, "--coordinator=:80: expected HOST:PORT"),
        ("localhost:65536", 0, "--coordinator=localhost:65536: expected HOST:PORT"),
        ("localhost:x", 0, "--coordinator=localhost:x: expected HOST:PORT"),
        ("fd00::7:80", 0, r"an IPv6 address needs brackets, as in \[fd00::7\]:80"),
        ("localhost:80", 2, "--process_id=2: expected 0 to 1 for --num_processes=2"),
        ("localhost:80", -1, "--process_id=-1: expected 0 to 1"),
    ],
)
def test_an_invalid_address_or_number_is_refused(coordinator, process_id, message):
    with pytest.raises(ValueError, match=message):
        Processes(coordinator, 2, process_id)


_SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def test_the_processes_of_a_cluster_are_found(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "")
    with pytest.raises(ValueError, match="neither Slurm, Open MPI, .* started this process; start"):
        processes.detected(None, 300)
    with monkeypatch.context() as mpi:
        for name, value in _MPI.items():
            mpi.setenv(name, value)
        found = processes.detected(None, 300)
        assert found.coordinator.startswith("10.96.0.1:")
        assert (found.num_processes, found.process_id) == (2, 1)
    for name, value in _SLURM.items():
        monkeypatch.setenv(name, value)
    assert processes.detected(None, 300) == Processes("node07:61441", 3, 2, 300)
    assert processes.detected(1234, 300).coordinator == "node07:1234"


# After both have met, process `which` `ends`, and the other one continues with collectives.
_ENDS = """
import os, signal, sys, time
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes
which, ends, count, coordinator, process_id = sys.argv[1:]
here = int(count), int(process_id)
settings = processes.Processes(coordinator, *here, timeout_secs=60, heartbeat_timeout_secs=6)
with processes.joined(settings):
    processes.of_first(1)
    if process_id == which and ends == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if process_id == which and ends == "fails":
        raise ValueError("the disk is full")
    if process_id == which and ends == "leaves":
        time.sleep(3)
    for _ in range(10**6 if ends != "leaves" else 0):
        processes.of_first(1)
"""


_DIES = ("dies", -signal.SIGKILL, "has died")
_FAILS = ("fails", 1, "has failed: the disk is full")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "ends", "status", "why"),
    [
        (1, *_FAILS),  # In the next test, one of three dies.
        (0, *_DIES),
        (1, *_DIES),
        (0, *_FAILS),
    ],
)
def test_when_one_process_ends_the_other_names_it_and_ends(which, ends, status, why):
    started = _start(_ENDS, str(which), ends, "2")
    assert started[which].wait(timeout=60) == status
    ended = time.monotonic()
    assert started[1 - which].wait(timeout=60) == processes.EXIT_STATUS
    assert time.monotonic() - ended < 5
    printed = _finish(started)
    line = f"Process {1 - which} ends: process {which} {why}. Start all of them again."
    _assert_ends(printed, 1 - which, line)
    if ends == "fails":
        _assert_ends(printed, which, f"Process {which} of 2 ends: the disk is full")


@pytest.mark.slow
def test_when_one_of_three_dies_both_others_name_it_at_once():
    started = _start(_ENDS, "1", "dies", "3", count=3)
    assert started[1].wait(timeout=60) == -signal.SIGKILL
    ended = time.monotonic()
    printed = _finish(started)
    assert time.monotonic() - ended < 5
    for i in (0, 2):
        assert started[i].returncode == processes.EXIT_STATUS
        line = f"Process {i} ends: process 1 has died. Start all of them again."
        _assert_ends(printed, i, line)


@pytest.mark.slow
def test_a_strangers_connection_changes_nothing():
    started = _start(_ENDS, "1", "leaves", "2")
    host, port = started[0].args[-2].split(":")
    for said in (b"GET / HTTP/1.0\r\n\r\n", b""):
        connection, deadline = None, time.monotonic() + 60
        while connection is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, int(port)))
        connection.sendall(said)
        connection.close()
    printed = _finish(started)
    assert [process.returncode for process in started] == [0, 0], printed


@pytest.mark.slow
def test_a_port_that_is_taken_is_named():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
        patient = _ALONE.replace("timeout_secs=2", "timeout_secs=60")
        done = subprocess.run(
            [sys.executable, "-c", patient, coordinator, "0"], capture_output=True, text=True
        )
    assert f"ValueError: --coordinator={coordinator}: Address already in use" in done.stderr


_UNEQUAL = """
import sys
from xla_spmd.runtime import environment
coordinator, process_id = sys.argv[1:]
environment.prepare(num_devices=1 + int(process_id))
from lingvo_gshard.spmd import processes
with processes.joined(processes.Processes(coordinator, 2, int(process_id), timeout_secs=60)):
    print("joined")
"""


@pytest.mark.slow
def test_processes_with_different_numbers_of_devices_are_refused():
    started = _start(_UNEQUAL)
    printed = _finish(started)
    assert [process.returncode for process in started] == [1, 1], printed
    for i, (out, err) in enumerate(printed):
        assert out == ""
        assert err.splitlines()[-1] == (
            f"Process {i} ends: the processes have different numbers of devices: process 0 has 1, "
            "process 1 has 2; give each the same."
        )


_DIFFERENT = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes
coordinator, process_id = sys.argv[1:]
if process_id == "0":
    processes._POLL_SECS = 30  # It learns of process 2's end before it looks for failures itself.
with processes.joined(processes.Processes(coordinator, 3, int(process_id), timeout_secs=60)):
    processes.check_alike({"code": "abc"})
    dim = 16 if process_id == "1" else 8
    processes.check_alike({"versions": "jax 1", "settings": f"task.cls : X\\ntask.dim : {dim}"})
    print("computes")
"""


@pytest.mark.slow
def test_a_process_with_other_settings_is_named_before_anything_is_computed():
    started = _start(_DIFFERENT, count=3)
    printed = _finish(started)
    reason = "settings unlike process 0's: task.dim : 16 here, task.dim : 8 there."
    assert [out for out, _ in printed] == ["", "", ""], printed
    _assert_ends(printed, 1, f"Process 1 of 3 ends: {reason}")
    for i in (0, 2):
        line = f"Process {i} ends: process 1 has failed: {reason} Start all of them again."
        _assert_ends(printed, i, line)
    statuses = [process.returncode for process in started]
    assert statuses == [processes.EXIT_STATUS, 1, processes.EXIT_STATUS]


_MISCOUNTED = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes
coordinator, process_id = sys.argv[1:]
with processes.joined(processes.Processes(coordinator, 2 + int(process_id), int(process_id))):
    print("computes")
"""


@pytest.mark.slow
def test_a_process_that_counts_more_processes_is_refused():
    started = _start(_MISCOUNTED)
    printed = _finish(started)
    for i, (out, err) in enumerate(printed):
        assert out == "" and err.splitlines()[-1] == (
            f"Process {i} ends: the processes have different --num_processes: process 0 has 2, "
            "process 1 has 3; give each the same."
        )
    assert [process.returncode for process in started] == [1, 1]


_TWICE = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import coordination, processes
coordination._TAKEN_SECS = 1.0
count, coordinator, process_id = sys.argv[1:]
with processes.joined(processes.Processes(coordinator, int(count), int(process_id))):
    processes.of_first(1)
    print("computed", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_process_with_a_number_that_is_taken_or_beyond_the_last_is_refused():
    coordinator = f"127.0.0.1:{ports.free()}"

    def start(count, process_id):
        command = [sys.executable, "-c", _TWICE, str(count), coordinator, str(process_id)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, text=True, **pipes)

    # The run of two computes; the others come later, and change nothing for it.
    run = [start(2, 0), start(2, 1)]
    for process in run:
        while "computed" not in (line := process.stdout.readline()):
            assert line, process.communicate()
    refused = {
        f"--coordinator={coordinator}: another process 0 has started there; give": start(2, 0),
        "Another process has --process_id=1; give each process its own, from 0 to 1": start(2, 1),
        "The processes have different --num_processes: process 0 has 2, process 2 has 3": start(
            3, 2
        ),
    }
    for message, process in refused.items():
        _, err = process.communicate(timeout=60)
        assert f"ValueError: {message}" in err.splitlines()[-1] and process.returncode == 1, err

    for process in run:
        process.stdin.close()
    statuses = [process.wait(timeout=60) for process in run]
    assert statuses == [0, 0], [process.stderr.read() for process in run]


_FOLDERS = """
import os, sys, time
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes, shared_folder
shared_folder._SHOWN_SECS = 0.5
here, coordinator, process_id = sys.argv[1:]
with processes.joined(processes.Processes(coordinator, 2, int(process_id), timeout_secs=60)):
    shared_folder.check(f"{here}/new/run")
    shared_folder.check(here)
    if process_id == "0":
        time.sleep(1)  # Process 1 looks for the folder before it is made.
        os.makedirs(f"{here}/late/run")
    shared_folder.check(f"{here}/late/run")
    print("shared", flush=True)
    os.chdir(f"{here}/{process_id}")
    shared_folder.check("run")
    print("saves")
"""


@pytest.mark.slow
def test_an_unshared_folder_is_reported_at_once(tmp_path):
    for i in range(2):
        (tmp_path / str(i)).mkdir()
    started = _start(_FOLDERS, str(tmp_path))
    printed = _finish(started)
    assert [process.returncode for process in started] == [1, 1], printed
    for i, (out, err) in enumerate(printed):
        assert out.splitlines()[-1] == "shared"  # After Gloo's own line.
        assert err.splitlines()[-1] == (
            f"Process {i} of 2 ends: run: process 0 wrote a file there, which process 1 does not "
            "see: give all the same folder, on a disk that they share."
        )
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1", "late", "run"]


_OTHER_NAME = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes, shared_folder
here, coordinator, process_id = sys.argv[1:]
with processes.joined(processes.Processes(coordinator, 2, int(process_id), timeout_secs=60)):
    shared_folder.check([f"{here}/a/b/c/run", "/not/there"][int(process_id)])
"""


@pytest.mark.slow
def test_a_new_folder_of_another_name_and_depth_is_not_shared(tmp_path):
    started = _start(_OTHER_NAME, str(tmp_path))
    printed = _finish(started)
    for i, (_, err) in enumerate(printed):
        assert "process 1 and process 0 have different folders" in err.splitlines()[-1], (i, err)
    assert not list(tmp_path.iterdir())


_ALONE = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes
coordinator, process_id = sys.argv[1:]
with processes.joined(processes.Processes(coordinator, 2, int(process_id), timeout_secs=2)):
    print("joined")
"""


@pytest.mark.slow
@pytest.mark.parametrize("process_id", [0, 1])
def test_a_process_without_peers_reports_it_and_ends(process_id):
    coordinator = f"127.0.0.1:{ports.free()}"
    command = [sys.executable, "-c", _ALONE, coordinator, str(process_id)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (processes.EXIT_STATUS, "")
    assert (
        f"Process {process_id} ends: not all 2 processes came to {coordinator} within 2 s. Start "
        "all of them again."
    ) in done.stderr


_IMPATIENT = """
import sys
from xla_spmd.runtime import environment
environment.prepare(num_devices=1)
from lingvo_gshard.spmd import processes
coordinator, process_id = sys.argv[1:]
timeout_secs = 20 if process_id == "1" else 100
with processes.joined(
    processes.Processes(coordinator, 3, int(process_id), timeout_secs=timeout_secs)
):
    print("joined")
"""


@pytest.mark.slow
def test_a_process_that_gives_up_waiting_is_not_taken_for_dead():
    started = _start(_IMPATIENT, count=2)
    printed = _finish(started)
    coordinator = started[0].args[-2]
    late = f"not all 3 processes came to {coordinator} within 20 s. Start all of them again."
    _assert_ends(printed, 1, f"Process 1 ends: {late}")
    early = "process 1 ended before all 3 had joined. Start all of them again."
    _assert_ends(printed, 0, f"Process 0 ends: {early}")


@pytest.mark.slow
def test_the_service_finds_no_modules_in_the_current_folder(tmp_path):
    """A file of the user's may have the same name as any module."""
    script = tmp_path / "scripts" / "alone.py"
    script.parent.mkdir()
    script.write_text(_ALONE)
    (tmp_path / "socket.py").write_text("raise ImportError\n")
    coordinator = f"127.0.0.1:{ports.free()}"
    done = subprocess.run(
        [sys.executable, script, coordinator, "0"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert f"not all 2 processes came to {coordinator} within 2 s" in done.stderr
