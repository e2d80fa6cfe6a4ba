"""JAX's coordination service, in a separate process beside process 0.

    coordination.py PORT NUM_PROCESSES HEARTBEAT_TIMEOUT_SECS

JAX would run the service in process 0, and aborts every process that loses its connection to it.
Here the service outlives process 0 until the other processes have reported the reason in one line
and have exited with their own status.

Each process also keeps a connection, a watch, open to this process. When a watch ends, the process
at its other end has died, and the other processes are sent its number. So they learn of a death at
once, whereas JAX waits for missed heartbeats.

The first line of standard output is the port for the watches, or the reason why the service did not
start. This process ignores the signals that stop training. Its standard input is a pipe from
process 0. When the pipe closes, this process ends: at once after the line `done`, else after
_GRACE_SECS.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time

_GREETING = b"lingvo_gshard"  # The process's number follows, in _NUMBER_BYTES.
_NUMBER_BYTES = 4
_GRACE_SECS = 3.0
# How long the service of a run that has just ended may still hold a port.
_BIND_SECS = 2 * _GRACE_SECS


def watch(host: str, port: int, process: int) -> socket.socket:
    """Returns a connection that represents `process` while it is open; see read_death."""
    connection = socket.create_connection((host, port))
    connection.sendall(_GREETING + process.to_bytes(_NUMBER_BYTES))
    return connection


def read_death(connection: socket.socket) -> int | None:
    """Waits for the next death and returns the process's number; None if the service is gone."""
    try:
        number = connection.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
    except OSError:
        return None
    return int.from_bytes(number) if len(number) == _NUMBER_BYTES else None


class _Watches:
    """The connections of all processes, by the process's number."""

    def __init__(self) -> None:
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
            with self._lock:
                self._connections[process] = connection
                for dead in self._dead:  # They died before this process connected.
                    _tell(connection, dead)
            _received(connection, 1)  # Nothing more is sent: this returns when the connection ends.

        # The process has died, as the connection cannot outlive it.
        with self._lock:
            del self._connections[process]
            self._dead.append(process)
            for other in self._connections.values():
                _tell(other, process)


def _tell(connection: socket.socket, process: int) -> None:
    """Sends the number of a dead process."""
    # If the other end has died, too, its own thread notices.
    with contextlib.suppress(OSError):
        connection.sendall(process.to_bytes(_NUMBER_BYTES))


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns the next bytes from the other end; fewer if the connection ends."""
    try:
        return connection.recv(num_bytes, socket.MSG_WAITALL)
    except OSError:  # The other end was reset.
        return b""


def _listen(port: int) -> socket.socket:
    """Listens on a port of all addresses: IPv4 and, if available, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _await_free(port: int) -> None:
    """Waits a little for a port that is taken; raises OSError if it stays taken.

    The service itself cannot detect this: its library shares a port with any other that allows it.
    """
    deadline = time.monotonic() + _BIND_SECS
    while True:
        try:
            _listen(port).close()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def main(port: int, num_processes: int, heartbeat_timeout_secs: int) -> None:
    """Serves until process 0 ends. Prints the port for the watches, or why it cannot serve."""
    # A signal that stops training reaches the whole job, but the others still need the service.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    # The watches use any free port, which process 0 sends to the others.
    try:
        _await_free(port)
        listener = _listen(0)
    except OSError as error:
        print(error.strerror, flush=True)
        return

    # Import JAX only here: the processes import this module for their ends of the watches.
    from xla_spmd.runtime import jax_runtime

    any_address = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        service = jax_runtime.coordination_service(
            f"{any_address}:{port}", num_processes, heartbeat_timeout_secs
        )
    except ValueError as error:  # A different JAX may lack this service.
        print(str(error).removesuffix("."), flush=True)
        return
    threading.Thread(target=_Watches().serve, args=[listener], daemon=True).start()
    print(listener.getsockname()[1], flush=True)

    last_words = sys.stdin.read()  # Returns when process 0 closes the pipe, or dies.
    if last_words != "done\n":
        time.sleep(_GRACE_SECS)
    del service
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
