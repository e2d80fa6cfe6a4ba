"""Connections that are not HTTP, lack a request, or end early; and signals."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import urllib.request

import pytest
from aiohttp import ClientSession

from lingvo_gshard.serving import connection
from lingvo_gshard.serving.app import Server
from tests.serving.shouter import Shouter


@contextlib.asynccontextmanager
async def _listening(translator):
    """Yields the port of a server, which ends with the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with connection.listening(Server(translator).app(), listener):
        yield listener.getsockname()[1]


async def _answer(port, sent):
    """Returns all bytes that a connection receives until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize(
    "request_line",
    [
        b"FROB!NICATE / HTTP/1.1\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n",
        b"POST /translate HTTP/1.1\r\nContent-Length: many\r\n",
    ],
)
def test_invalid_http_is_answered_as_json(request_line, caplog):
    async def run():
        async with _listening(Shouter()) as port:
            return await _answer(port, request_line + b"Host: here\r\n\r\n")

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), head
    assert json.loads(body)["error"] and b"application/json" in head
    assert "serving: no valid request from 127.0.0.1: " in caplog.text


@pytest.mark.parametrize("sent", [b"", b"POST /translate HTTP/1.1\r\nHost: he"])
def test_a_connection_without_a_request_is_closed(sent, monkeypatch):
    monkeypatch.setattr(connection, "_IDLE_SECS", 0.2)

    async def run():
        async with _listening(Shouter()) as port:
            return await _answer(port, sent)

    assert asyncio.run(run()) == b""


def test_lines_of_closed_connections_are_not_translated():
    translator = Shouter(secs=0.05)

    async def run():
        async with _listening(translator) as port, ClientSession() as session:

            async def post(lines):
                url = f"http://127.0.0.1:{port}/translate"
                async with session.post(url, json={"lines": lines}) as answer:
                    return await answer.json()

            waiting = asyncio.create_task(post(["a"] * 50))
            while not translator.batches:
                await asyncio.sleep(0.01)
            waiting.cancel()
            return await post(["b"])

    assert asyncio.run(run())["translations"][0][0]["text"] == "B"
    assert len(translator.batches) < 5 and translator.batches[-1] == 1


def test_a_signal_ends_the_server():
    number = signal.SIGTERM
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/healthz"
    statuses = []

    def ask_and_stop():
        with urllib.request.urlopen(url, timeout=30) as answer:
            statuses.append(answer.status)
        os.kill(os.getpid(), number)

    client = threading.Thread(target=ask_and_stop)
    client.start()
    before = signal.getsignal(number)
    connection.run(Server(Shouter()).app(), listener)
    client.join()
    signal.signal(number, before)
    assert statuses == [200] and listener.fileno() == -1
