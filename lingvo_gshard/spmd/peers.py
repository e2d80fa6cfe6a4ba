"""Processes that watch each other: when one ends, the others end too, and say which it was.

Every process holds a connection to process 0 and sends a line a second over it. A connection that
breaks is a process that died, as is one that stays silent. Left to itself, JAX aborts a process
whose peer is gone: after its own heartbeats are missed or, if process 0 is gone, at once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping

# The exit status of a process that ends because another one has (sysexits.h: unavailable).
EXIT_STATUS = 69
_BEAT_SECS = 1.0
# A process says who it is as soon as it has connected.
_HELLO_SECS = 5.0
# An empty line is a beat; any other but this says why the run has ended.
_LEAVES = "leaves"


class Watch:
    """The connections of one process to the others that it watches.

    As soon as one of them dies, this process tells the rest, prints which it was, and ends with
    EXIT_STATUS, whatever its other threads do.
    """

    def __init__(
        self, process_id: int, peers: Mapping[int, socket.socket], silence_secs: float
    ) -> None:
        """Watches, in a thread, until all have left.

        Args:
          process_id: this one's.
          peers: connections, by the process at their other end.
          silence_secs: how long one may be silent.
        """
        self._process_id, self._silence_secs = process_id, silence_secs
        self._peers = dict(peers)
        self._received = {process: b"" for process in peers}
        self._heard = dict.fromkeys(peers, time.monotonic())
        # Of the thread that ends this process; the other waits for it, and so for the end.
        self._ends = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Tells the others that this process ends in order."""
        self._tell(_LEAVES)

    def fail(self, reason: str) -> None:
        """Tells the others in one line why this process ends; they end, too.

        If another one has died, which is often seen first as an error in a collective, this
        process ends here, as a Watch does.
        """
        self._thread.join(2 * _BEAT_SECS)
        self._ends.acquire()  # The others' answer must not end this process in its caller's stead.
        self._part(f"process {self._process_id} has failed: {reason}")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._peers.items():
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, process)
            beat = time.monotonic()
            while selector.get_map():
                for key, _ in selector.select(_BEAT_SECS):
                    if self._reads_leave(key.data):
                        selector.unregister(key.fileobj)
                        del self._heard[key.data]
                now = time.monotonic()
                if now - beat >= _BEAT_SECS:
                    beat = now
                    self._tell("")
                for process, heard in self._heard.items():
                    if now - heard > self._silence_secs:
                        self._end(f"process {process} has been silent for {now - heard:.0f} s")

    def _reads_leave(self, process: int) -> bool:
        """Reads what is there of one process; whether it says that it leaves."""
        try:
            data = self._peers[process].recv(4096)
        except BlockingIOError:  # There is nothing after all.
            return False
        except OSError:
            data = b""
        if not data:
            self._end(f"process {process} has died")
        self._heard[process] = time.monotonic()
        *lines, self._received[process] = (self._received[process] + data).split(b"\n")
        for line in filter(None, lines):
            if line.decode() == _LEAVES:
                return True
            self._end(line.decode())
        return False

    def _tell(self, line: str) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(OSError):  # One that is gone is noticed as it is read.
                connection.send(f"{line}\n".encode())

    def _part(self, line: str) -> None:
        """Tells the others, and lets them hang up first, if they do so soon.

        A connection closed with something unread is reset, and what was told may be lost with it.
        """
        self._tell(line)
        deadline = time.monotonic() + _BEAT_SECS
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        for connection in self._peers.values():
            with contextlib.suppress(OSError):  # It is late, or gone.
                while (left := deadline - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(4096):
                        break

    def _end(self, why: str) -> None:
        self._ends.acquire()
        self._part(why)
        sys.stdout.flush()
        print(
            f"Process {self._process_id} ends: {why}. Start all of them again.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STATUS)


def listen() -> socket.socket:
    """Where process 0 waits for the others, on a port that is free."""
    return socket.create_server(("", 0))


def accepted(
    listener: socket.socket, num_processes: int, timeout_secs: float
) -> dict[int, socket.socket]:
    """Process 0's connections, one from each other process; closes the listener, tells all.

    Whoever else finds the port, and whatever it says or does not, is sent away.

    Raises:
      TimeoutError: one does not come in time.
    """
    deadline = time.monotonic() + timeout_secs
    others = set(range(1, num_processes))
    peers: dict[int, socket.socket] = {}
    with listener:
        while others > peers.keys():
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise TimeoutError(
                    f"processes {sorted(others - peers.keys())} did not connect to process 0's "
                    f"port {listener.getsockname()[1]} within {timeout_secs:.0f} s."
                ) from None
            process = _introduced(connection)
            if process in others:
                peers[process] = connection
            else:
                connection.close()
    for connection in peers.values():
        with contextlib.suppress(OSError):  # One that is gone is noticed as it is read.
            connection.sendall(b"\n")
    return peers


def _introduced(connection: socket.socket) -> int:
    """Which process is at the other end; no such one if it does not say."""
    connection.settimeout(_HELLO_SECS)
    try:
        return int.from_bytes(connection.recv(4, socket.MSG_WAITALL))
    except OSError:  # It is silent, or gone.
        return -1


def connected(
    address: tuple[str, int], process_id: int, timeout_secs: float
) -> dict[int, socket.socket]:
    """Another process's only connection, to process 0, as soon as all have come to it.

    Raises:
      OSError: it can't be reached at `address`, or is silent for `timeout_secs`; names it.
    """
    try:
        connection = socket.create_connection(address, timeout_secs)
        connection.sendall(process_id.to_bytes(4))
        connection.recv(1)  # Nothing, if process 0 has died: its Watch tells.
    except OSError as error:
        raise OSError(
            f"process 0 can't be reached at {address[0]}:{address[1]}: {error}"
        ) from error
    return {0: connection}


@contextlib.contextmanager
def relayed(address: tuple[str, int]) -> Iterator[str]:
    """Another address of a service, as `host:port`; what connects there never sees it close.

    A client that would abort if its service were gone does not, for as long as this process lives.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_relay, args=(listener, address), name="relay", daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def _relay(listener: socket.socket, address: tuple[str, int]) -> None:
    with contextlib.suppress(OSError):  # It is closed.
        while True:
            client, _ = listener.accept()
            try:
                service = socket.create_connection(address)
            except OSError:  # It has not begun yet: the client tries again.
                client.close()
                continue
            for pump in ((client, service, True), (service, client, False)):
                threading.Thread(target=_pump, args=pump, name="relay", daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, closes: bool) -> None:
    """Carries what comes to its end; then, if it `closes`, ends both connections."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    if closes:
        for end in (sink, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # Alone, close waits for the other pump to read.
            end.close()
