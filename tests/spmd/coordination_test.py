"""The watches of JAX's coordination service; processes_test.py tests the service itself."""

import socket
import threading

import pytest

from lingvo_gshard.spmd import coordination


@pytest.fixture
def port():
    listener = socket.create_server(("127.0.0.1", 0))
    watches = coordination._Watches()
    threading.Thread(target=watches.serve, args=[listener], daemon=True).start()
    return listener.getsockname()[1]


def test_a_closed_connection_is_reported_to_all_others(port):
    watches = [coordination.watch("127.0.0.1", port, process) for process in (0, 1, 300)]
    watches[2].close()
    assert [coordination.read_death(watch) for watch in watches[:2]] == [300, 300]
    watches[0].close()
    assert coordination.read_death(watches[1]) == 0


def test_a_late_process_is_informed_too(port):
    first = coordination.watch("127.0.0.1", port, 0)
    coordination.watch("127.0.0.1", port, 1).close()
    assert coordination.read_death(first) == 1
    assert coordination.read_death(coordination.watch("127.0.0.1", port, 2)) == 1


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"lingvo_gshard", b"lingvo_gshard\0\0\1", b"lin"]
)
def test_a_foreign_connection_is_not_a_death(port, said):
    watches = [coordination.watch("127.0.0.1", port, process) for process in (0, 1)]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(said)
    watches[1].close()
    assert coordination.read_death(watches[0]) == 1


def test_the_end_of_the_service_is_not_a_death(port):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch = coordination.watch(*listener.getsockname(), 0)
        listener.accept()[0].close()
    assert coordination.read_death(watch) is None
