"""Listens for connections, limits their cost, and answers requests that are not HTTP."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator

from aiohttp import web

from lingvo_gshard.serving import messages

_LOG_FORMAT = f'%t %a %{{{messages.REQUEST_ID}}}o "%r" %s %b bytes %Tf s'
_IDLE_SECS = 75.0  # A connection without a complete request for this long is closed.
_BACKLOG = 128  # The number of connections that wait to be accepted.


class Connection(web.RequestHandler):
    """A connection that answers in JSON to anything that aiohttp cannot read as HTTP.

    Such input is not a request yet, so neither a handler nor a middleware sees it.
    """

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the answer, after which the connection is closed."""
        logging.warning("serving: no valid request from %s: %r", request.remote, exc)
        error = messages.one_line(message)
        response = web.json_response({"error": error}, status=status)
        response.force_close()
        return response


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 takes a free one. Raises ValueError if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"--port={port} on {host}: {error.strerror or error}.") from error


@contextlib.asynccontextmanager
async def listening(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serves an application on a socket until the block ends; then finishes open requests."""
    loop = asyncio.get_running_loop()
    # A client that hangs up cancels its handler, so that nothing is decoded for it.
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()

    def connection() -> Connection:
        assert runner.server is not None
        return Connection(
            runner.server,
            loop=loop,
            keepalive_timeout=_IDLE_SECS,
            access_log_format=_LOG_FORMAT,
        )

    try:
        # aiohttp's own sites would create connections of its own class.
        server = await loop.create_server(connection, sock=listener, backlog=_BACKLOG)
        try:
            yield
        finally:
            server.close()
    finally:
        await runner.cleanup()


def run(app: web.Application, listener: socket.socket) -> None:
    """Serves an application on a socket until SIGINT or SIGTERM; a second one stops at once."""
    asyncio.run(_run(app, listener))


async def _run(app: web.Application, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopped.set)

    async with listening(app, listener):
        await stopped.wait()
        # Open requests may take a while; a second signal has its default effect.
        for number in signals:
            loop.remove_signal_handler(number)
