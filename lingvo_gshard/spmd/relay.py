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
    both = process == 0 and socket.has_dualstack_ipv6()  # IPv4 and IPv6, from other machines, too.
    try:
        listener = socket.create_server(
            ("127.0.0.1", 0) if process else ("", own_port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
        )
    except OSError as error:
        print(error.strerror, flush=True)
        return
    print(listener.getsockname()[1], flush=True)
    while True:
        start(_relay, listener.accept()[0], (host, port), process)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def _relay(accepted: socket.socket, address: tuple[str, int], process: int) -> None:
    """Relays a connection of JAX's client, or of another process's relay, to `address`."""
    try:
        if process:
            own, other, number = accepted, socket.create_connection(address), 0
            other.sendall(_GREETING + process.to_bytes(4))
        else:
            greeting = accepted.recv(len(_GREETING) + 4, socket.MSG_WAITALL)
            if greeting[:-4] != _GREETING:
                raise ConnectionRefusedError("not a relay")
            own, other = socket.create_connection(address), accepted
            number = int.from_bytes(greeting[-4:])
    except OSError:  # Process 0 or JAX's service may not have started yet.
        accepted.close()
        return
    start(_forward, own, other)
    _forward(other, own)
    with contextlib.suppress(BrokenPipeError):  # The process that started this relay is gone, too.
        print(number, flush=True)


def _forward(source: socket.socket, sink: socket.socket) -> None:
    """Copies until `source` closes; the sink stays open."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            with contextlib.suppress(OSError):  # The sink is gone.
                sink.sendall(data)


def start(target: Callable[..., None], *args: Any) -> None:
    """Runs a function in a thread that ends with the process."""
    threading.Thread(target=target, args=args, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
