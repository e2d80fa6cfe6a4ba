"""Processes that watch each other end when one of them does, and say which; relayed connections."""

import contextlib
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent import futures

import pytest

from lingvo_gshard.spmd import peers

# Process 0 prints its port; then each, once all watch, does what it is told.
_PROCESS = """
import os, signal, socket, sys, time
from lingvo_gshard.spmd import peers
process_id, port, does = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if process_id == 0:
    listener = peers.listen()
    print(listener.getsockname()[1], flush=True)
    found = peers.accepted(listener, 3, 60)
else:
    found = peers.connected(("127.0.0.1", port), process_id, 60)
watch = peers.Watch(process_id, found, 3)
print("watches", flush=True)
sys.stdin.readline()
if does == "leaves":
    watch.leave()
    sys.exit(0)
if does == "fails":
    watch.fail("the disk is full")
    time.sleep(1)  # The others have ended, and told so.
    os._exit(1)
if does == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""


def _start(process_id, port, does):
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, str(process_id), str(port), does],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def _three(*do):
    """Three processes that have met."""
    started = [_start(0, 0, do[0])]
    port = int(started[0].stdout.readline())
    started += [_start(i, port, do[i]) for i in (1, 2)]
    try:
        for process in started:
            assert process.stdout.readline() == "watches\n", process.stderr.read()
        for process in started:
            print(file=process.stdin, flush=True)
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("one", "does", "status", "why"),
    [
        (0, "dies", -signal.SIGKILL, "process 0 has died"),
        (2, "dies", -signal.SIGKILL, "process 2 has died"),
        (1, "fails", 1, "process 1 has failed: the disk is full"),
        (2, "stops", None, r"process 2 has been silent for [34] s"),
    ],
)
def test_when_one_ends_all_end_and_name_it(one, does, status, why):
    with _three(*(does if i == one else "stays" for i in range(3))) as processes:
        others = [i for i in range(3) if i != one]
        if status is not None:
            assert processes[one].wait(timeout=20) == status
        for i in others:
            assert processes[i].wait(timeout=20) == peers.EXIT_STATUS
            said = processes[i].stderr.read()
            assert re.search(rf"Process {i} ends: {why}\. Start all of them again\.", said)


def test_when_one_leaves_the_others_stay():
    with _three("stays", "leaves", "stays") as processes:
        assert processes[1].wait(timeout=20) == 0
        time.sleep(2)
        assert [processes[i].poll() for i in (0, 2)] == [None, None]


def test_a_relayed_connection_carries_both_ways_and_stays_when_the_service_goes():
    with (
        socket.create_server(("127.0.0.1", 0)) as service,
        peers.relayed(service.getsockname()) as address,
    ):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), 10) as client:
            connection, _ = service.accept()
            client.sendall(b"x" * 100_000)
            received = b""
            while len(received) < 100_000:
                received += connection.recv(1 << 16)
            connection.sendall(b"yes")
            assert client.recv(3) == b"yes"
            connection.close()
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_a_relayed_service_sees_its_client_go():
    with (
        socket.create_server(("127.0.0.1", 0)) as service,
        peers.relayed(service.getsockname()) as address,
    ):
        host, port = address.split(":")
        client = socket.create_connection((host, int(port)), 10)
        connection, _ = service.accept()
        connection.settimeout(10)
        client.close()
        assert connection.recv(1) == b""


def test_not_all_come_in_time():
    """One that is no process of ours does not count."""
    listener = peers.listen()
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1")
        with pytest.raises(TimeoutError, match=r"processes \[1, 2\] did not connect to process 0"):
            peers.accepted(listener, 3, 0.2)


def test_strangers_do_not_keep_a_process_out(monkeypatch):
    """One is silent, one hangs up at once; who comes after them is let in."""
    monkeypatch.setattr(peers, "_HELLO_SECS", 0.1)
    listener = peers.listen()
    address = "127.0.0.1", listener.getsockname()[1]
    with (
        futures.ThreadPoolExecutor() as thread,
        socket.create_connection(address),
        socket.create_connection(address) as rude,
    ):
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.close()  # A reset, which its reader sees as an error.
        connected = thread.submit(peers.connected, address, 1, 5.0)
        accepted = peers.accepted(listener, 2, 5.0)
        with contextlib.closing(connected.result()[0]) as connection:
            assert accepted.keys() == {1}
            accepted[1].sendall(b"hello")
            assert connection.recv(5) == b"hello"
            accepted[1].close()


def test_who_has_come_waits_for_the_others():
    listener = peers.listen()
    address = "127.0.0.1", listener.getsockname()[1]
    with futures.ThreadPoolExecutor() as threads:
        accepted = threads.submit(peers.accepted, listener, 3, 5.0)
        first = threads.submit(peers.connected, address, 1, 5.0)
        with pytest.raises(TimeoutError):
            first.result(timeout=0.3)
        second = threads.submit(peers.connected, address, 2, 5.0)
        of_first, of_second = first.result(), second.result()
        for connection in (of_first[0], of_second[0], *accepted.result().values()):
            connection.close()


def test_process_0_does_not_answer():
    message = r"process 0 can't be reached at .*: timed out"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(OSError, match=message),
    ):
        peers.connected(listener.getsockname(), 1, 0.2)


def test_process_0_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(OSError, match=f"process 0 can't be reached at 127.0.0.1:{address[1]}: "):
        peers.connected(address, 1, 1.0)
