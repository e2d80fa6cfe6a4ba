"""Tests of the relays between processes and JAX's coordination service."""

import socket
import subprocess
import sys
import time

from lingvo_gshard.spmd import relay


def test_a_relay_that_nobody_hears_any_more_ends_without_a_word():
    pipe = subprocess.PIPE
    with socket.create_server(("127.0.0.1", 0)) as first:
        command = [sys.executable, "-IS", relay.__file__, "1", *map(str, first.getsockname())]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as started:
            with socket.create_connection(("127.0.0.1", int(started.stdout.readline()))):
                connection, _ = first.accept()
                started.stdout.close()
                connection.close()  # Process 0 dies, and nobody reads its number.
                time.sleep(0.5)
            started.stdin.close()
            assert started.stderr.read() == ""
