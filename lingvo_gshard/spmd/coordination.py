"""JAX's coordination service, in a separate process beside process 0.

    coordination.py PORT NUM_PROCESSES HEARTBEAT_TIMEOUT_SECS

JAX would run the service in process 0, and aborts every process that loses its connection to it.
Here the service outlives process 0 until the other processes have reported the reason in one line
and have exited with their own status.

Each process also keeps a connection, a watch, open to this process. It is made before the process
joins JAX's service, whose port is the answer; so a second process with the same number is refused
here, whereas JAX would abort one of the two. When a watch ends, the process at its other end has
died, and the other processes are sent its number. So they learn of a death at once, whereas JAX
waits for missed heartbeats.

PORT is the port for the watches. The first line of standard output is `ready`, or the reason why
the service did not start. This process ignores the signals that stop training. Its standard input
is a pipe from process 0. When the pipe closes, this process ends: at once after the line `done`,
else after _GRACE_SECS.
"""

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import sys
import threading
import time

# A process's number follows in _NUMBER_BYTES; in the answer, two numbers as in Watch.
_GREETING = b"lingvo_gshard"
_NUMBER_BYTES = 4
_NOBODY = 2 ** (8 * _NUMBER_BYTES) - 1  # Not the number of a process.
_GRACE_SECS = 3.0
# How long the service of a run that has just ended may still hold a port.
_BIND_SECS = 2 * _GRACE_SECS
_CONNECT_SECS = 10.0
# Longer than a process of an earlier run may take to notice that its run has ended.
_TAKEN_SECS = 30.0
_BACKLOG = 1024  # All processes may connect while the service imports JAX.
_PROBE_SECS = 3.0
_RETRY_SECS = 0.1


@dataclasses.dataclass(frozen=True)
class Watch:
    """A connection that represents a process while it is open."""

    connection: socket.socket
    service_port: int  # The port of JAX's service; 0 if another process has the number.
    num_processes: int  # How many processes process 0 counts.


def watch(host: str, port: int, process: int) -> Watch:
    """Waits for the service, and returns the connection of `process`; see read_death.

    Raises ValueError if another process keeps the same number for _TAKEN_SECS.
    """
    deadline = time.monotonic() + _TAKEN_SECS
    while True:
        # The service may not have started yet. One that has seen the end of process 0, or of a
        # process of this number, belongs to an earlier run, and does not answer.
        with contextlib.suppress(OSError):
            answer = _ask(host, port, process)
            if answer is not None:
                if answer.service_port:
                    return answer
                answer.connection.close()
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"Another process has --process_id={process}; give each process its own, "
                        f"from 0 to {answer.num_processes - 1}."
                    )
        time.sleep(_RETRY_SECS)


def _ask(host: str, port: int, process: int, timeout_secs: float | None = None) -> Watch | None:
    """Greets the service; returns its answer, or None without one.

    Raises OSError if it cannot connect.
    """
    connection = socket.create_connection((host, port), timeout=_CONNECT_SECS)
    # Where nobody listens, TCP may connect a socket with itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        return None
    connection.settimeout(timeout_secs)
    _send(connection, _GREETING + _bytes(process))
    size = len(_GREETING) + 2 * _NUMBER_BYTES
    answer = _received(connection, size)
    if len(answer) < size or not answer.startswith(_GREETING):
        connection.close()
        return None

    numbers = answer[len(_GREETING) :]
    service_port = int.from_bytes(numbers[:_NUMBER_BYTES])
    return Watch(connection, service_port, int.from_bytes(numbers[_NUMBER_BYTES:]))


def read_death(connection: socket.socket) -> int | None:
    """Waits for the next death and returns the process's number; None if the service is gone."""
    number = _received(connection, _NUMBER_BYTES)
    return int.from_bytes(number) if len(number) == _NUMBER_BYTES else None


class _Watches:
    """The connections of all processes, by the process's number."""

    def __init__(self, service_port: int, num_processes: int) -> None:
        self._service_port = service_port
        self._num_processes = num_processes
        self._connections: dict[int, socket.socket] = {}
        self._dead: list[int] = []
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections forever, and awaits the end of each in a separate thread."""
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._await_end, args=[connection], daemon=True).start()

    def _await_end(self, connection: socket.socket) -> None:
        """When a process's connection ends, sends the other processes its number."""
        with connection:
            size = len(_GREETING) + _NUMBER_BYTES
            greeting = _received(connection, size)
            if len(greeting) < size or not greeting.startswith(_GREETING):
                return  # Not a process of this run.

            process = int.from_bytes(greeting[len(_GREETING) :])
            if not self._accept(process, connection):
                return
            _received(connection, 1)  # Nothing more is sent: this returns when the connection ends.

        # The process has died, as the connection cannot outlive it.
        with self._lock:
            del self._connections[process]
            self._dead.append(process)
            for other in self._connections.values():
                _send(other, _bytes(process))

    def _accept(self, process: int, connection: socket.socket) -> bool:
        """Answers a process's greeting; returns whether the connection now represents it."""
        with self._lock:
            if 0 in self._dead or process in self._dead:
                return False

            is_taken = process in self._connections
            service_port = 0 if is_taken else self._service_port
            _send(connection, _GREETING + _bytes(service_port) + _bytes(self._num_processes))
            if is_taken or process >= self._num_processes:
                return False

            self._connections[process] = connection
            for dead in self._dead:  # They died before this process connected.
                _send(connection, _bytes(dead))
            return True


def _bytes(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES)


def _send(connection: socket.socket, message: bytes) -> None:
    """Sends a message, unless the other end is gone, which whoever receives from it notices."""
    with contextlib.suppress(OSError):
        connection.sendall(message)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns the next bytes from the other end; fewer if the connection ends."""
    received = b""
    with contextlib.suppress(OSError):  # The other end was reset.
        while len(received) < num_bytes:
            part = connection.recv(num_bytes - len(received))
            if not part:
                break
            received += part
    return received


def _listen(port: int) -> socket.socket:
    """Listens on a port of all addresses: IPv4 and, if available, IPv6."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)


def _listen_once_free(port: int) -> socket.socket:
    """Listens on a port, and waits a little if it is taken; raises OSError if it stays taken."""
    deadline = time.monotonic() + _BIND_SECS
    while True:
        try:
            return _listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECS)


def _reason(error: OSError, port: int) -> str:
    """Returns why this process cannot listen on a port."""
    if error.errno == errno.EADDRINUSE:
        with contextlib.suppress(OSError):
            if _ask("localhost", port, _NOBODY, timeout_secs=_PROBE_SECS) is not None:
                return (
                    "another process 0 has started there; give each process its own --process_id, "
                    "and each run its own port"
                )
    return str(error.strerror)


def _reserved() -> socket.socket:
    """Returns a socket on a free port of all addresses, which JAX's service can share."""
    is_dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
    if is_dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("", 0))
    return reserved


def main(port: int, num_processes: int, heartbeat_timeout_secs: int) -> None:
    """Serves until process 0 ends. Prints `ready`, or why it cannot serve."""
    # A signal that stops training reaches the whole job, but the others still need the service.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    # JAX's service uses any free port, which the watches send to the processes.
    try:
        listener = _listen_once_free(port)
        reserved = _reserved()
    except OSError as error:
        print(_reason(error, port), flush=True)
        return

    # Import JAX only here: the processes import this module for their ends of the watches.
    from xla_spmd.runtime import jax_runtime

    service_port = reserved.getsockname()[1]
    any_address = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        service = jax_runtime.coordination_service(
            f"{any_address}:{service_port}", num_processes, heartbeat_timeout_secs
        )
    except ValueError as error:  # A different JAX may lack this service.
        print(str(error).removesuffix("."), flush=True)
        return
    watches = _Watches(service_port, num_processes)
    threading.Thread(target=watches.serve, args=[listener], daemon=True).start()
    print("ready", flush=True)

    last_words = sys.stdin.read()  # Returns when process 0 closes the pipe, or dies.
    if last_words != "done\n":
        time.sleep(_GRACE_SECS)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
