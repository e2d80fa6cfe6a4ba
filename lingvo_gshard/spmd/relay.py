"""Relays a process's connections to JAX's coordination service: relay.py PROCESS HOST PORT [OWN].

Process 0's relay listens on port OWN for the other processes' relays. Those listen for JAX's client
on a free port. A relay first prints its port, or the error that kept it from listening.

A relay keeps its connections to other relays open while the process that started it lives. So when
such a connection ends, the process at its other end has died, and the relay prints its number.

It is a process, not a thread: while TensorFlow lowers a function, it keeps Python's lock for
seconds to minutes, by the model's depth; JAX's heartbeats would not get through and JAX would
abort. It ends when its standard input does, and ignores the signals that stop a training.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

_GREETING = b"lingvo_gshard"  # To process 0's relay; the number of the process follows in 4 bytes.


def main(process: int, host: str, port: int, own_port: int = 0) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    start(_end_with_stdin)
    try:
        listener = socket.create_server(("127.0.0.1", 0)) if process else _public_listener(own_port)
    except OSError as error:
        print(error.strerror, flush=True)
        return
    print(listener.getsockname()[1], flush=True)
    relay = _from_client if process else _from_relay
    while True:
        start(relay, listener.accept()[0], (host, port), process)


def _public_listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def _from_client(client: socket.socket, coordinator: tuple[str, int], process: int) -> None:
    try:
        first = socket.create_connection(coordinator)
        first.sendall(_GREETING + process.to_bytes(4))
    except OSError:  # Process 0 has not started yet; the client will try again.
        client.close()
        return
    start(_forward, client, first)
    _forward(first, client)
    _tell_death(0)


def _from_relay(other: socket.socket, service: tuple[str, int], _: int) -> None:
    try:
        greeting = other.recv(len(_GREETING) + 4, socket.MSG_WAITALL)
        if greeting[:-4] != _GREETING:
            raise ConnectionRefusedError("not a relay")
        client = socket.create_connection(service)
    except OSError:  # JAX's service may not have started yet.
        other.close()
        return
    start(_forward, client, other)
    _forward(other, client)
    _tell_death(int.from_bytes(greeting[-4:]))


def _forward(source: socket.socket, sink: socket.socket) -> None:
    """Copies until `source` closes; the sink stays open."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            with contextlib.suppress(OSError):  # The sink is gone.
                sink.sendall(data)


def _tell_death(process: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # The process that started this relay is gone, too.
        print(process, flush=True)


def start(target: Callable[..., None], *args: Any) -> None:
    """Runs a function in a thread that ends with the process."""
    threading.Thread(target=target, args=args, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
