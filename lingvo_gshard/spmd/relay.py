"""A relay to process 0's coordination service, run as a process of its own: relay.py HOST PORT.

A thread would not do. While TensorFlow lowers a function, it keeps Python's lock for seconds to
minutes, by the model's depth; JAX's heartbeats would not get through and JAX would abort.

It prints its port, and a line when the service closes a connection. The clients' connections stay
open then. It ends when its standard input does, and ignores the signals that stop a training.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any


def main(host: str, port: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _start(_end_with_stdin)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        try:
            service = socket.create_connection((host, port))
        except OSError:  # Process 0 has not started yet; the client will try again.
            client.close()
            continue
        _start(_forward, client, service)
        _start(_receive, service, client)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def _receive(service: socket.socket, client: socket.socket) -> None:
    _forward(service, client)
    print("closed", flush=True)


def _forward(source: socket.socket, sink: socket.socket) -> None:
    """Copies until `source` closes; the sink stays open."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            with contextlib.suppress(OSError):  # The sink is gone.
                sink.sendall(data)


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
