"""The watches of JAX's coordination service; processes_test.py tests the service itself."""

import socket
import threading

import pytest

from lingvo_gshard.spmd import coordination

_SERVICE_PORT = 8476


@pytest.fixture
def port():
    listener = socket.create_server(("127.0.0.1", 0))
    watches = coordination._Watches(_SERVICE_PORT, 301)
    threading.Thread(target=watches.serve, args=[listener], daemon=True).start()
    return listener.getsockname()[1]


def _connected(port: int, process: int) -> socket.socket:
    return coordination.watch("127.0.0.1", port, process).connection


def test_a_closed_connection_is_reported_to_all_others(port):
    watches = [_connected(port, process) for process in (0, 1, 300)]
    watches[2].close()
    assert [coordination.read_death(watch) for watch in watches[:2]] == [300, 300]
    watches[0].close()
    assert coordination.read_death(watches[1]) == 0


def test_a_late_process_is_informed_too(port):
    first = _connected(port, 0)
    _connected(port, 1).close()
    assert coordination.read_death(first) == 1
    assert coordination.read_death(_connected(port, 2)) == 1


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"lingvo_gshard", b"lingvo_gshard\0\0\1", b"lin"]
)
def test_a_foreign_connection_is_not_a_death(port, said):
    watches = [_connected(port, process) for process in (0, 1)]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(said)
    watches[1].close()
    assert coordination.read_death(watches[0]) == 1


def test_the_end_of_the_service_is_not_a_death(port):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        listener.accept()[0].close()
    assert coordination.read_death(connection) is None


def test_a_number_is_given_once(port, monkeypatch):
    monkeypatch.setattr(coordination, "_TAKEN_SECS", 0.3)
    first = coordination.watch("127.0.0.1", port, 1)
    assert (first.service_port, first.num_processes) == (_SERVICE_PORT, 301)
    for _ in range(2):
        with pytest.raises(ValueError, match="Another process has --process_id=1; give .* to 300"):
            coordination.watch("127.0.0.1", port, 1)
    other = _connected(port, 0)
    _connected(port, 2).close()
    assert coordination.read_death(other) == 2  # Not 1: its first connection is open.


def test_a_service_without_process_0_waits_for_a_new_one(port):
    other = _connected(port, 1)
    _connected(port, 0).close()
    assert coordination.read_death(other) == 0
    assert coordination._ask("127.0.0.1", port, 2) is None


def test_a_connection_with_itself_is_not_an_answer(monkeypatch):
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    address = own.getsockname()
    own.connect(address)  # TCP's simultaneous open.
    monkeypatch.setattr(socket, "create_connection", lambda *args, **options: own)
    assert coordination._ask(*address, 1, timeout_secs=5) is None
    assert own.fileno() == -1


def test_a_number_that_has_died_waits_for_a_new_service(port):
    other = _connected(port, 0)
    _connected(port, 1).close()
    assert coordination.read_death(other) == 1
    assert coordination._ask("127.0.0.1", port, 1) is None


def test_another_service_on_the_port_is_not_an_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = threading.Thread(
            target=lambda: listener.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.6p1 Debian-4\r\n")
        )
        other.start()
        assert coordination._ask(*listener.getsockname(), 0) is None
        other.join()


def test_a_number_beyond_the_last_is_told_how_many_there_are(port):
    other = _connected(port, 0)
    beyond = coordination.watch("127.0.0.1", port, 301)
    assert beyond.num_processes == 301
    beyond.connection.close()
    _connected(port, 1).close()
    assert coordination.read_death(other) == 1
