"""Translation over HTTP.

    GET  /            a page with a form
    POST /translate   {"lines": ["Guten Tag"], "nbest": 2, "source_lang": "de"}; only lines are
                      required -> {"translations": [[{"text", "score", "num_tokens", ...}, ...]]};
                      or text/plain -> text/plain, one line for each line. A model of several
                      target languages needs /translate?target_lang=de, too
    GET  /languages      the codes of the languages, and of the targets that can be chosen
    GET  /healthz        200 while the server is up, also as /health
    GET  /readyz         200 once its programs are compiled and while its queue has room
    GET  /metrics        for Prometheus
    GET  /openapi.json   all of this as an OpenAPI description

Errors are answered as {"error": ...}, with one of these statuses:

    400   the request is wrong
    408   the body does not arrive in time
    413   the body, a line or the request is too large
    415   the body has another content type or an unknown charset
    429   too many tokens of this client wait already; the client may retry
    500   the translation failed
    503   the queue is full; the client may retry

A client is an address, or the entry that a proxy adds to a header. Every answer has an
X-Request-Id, which is the request's own if it has a valid one, and which the log contains.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import pathlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from lingvo_gshard.serving import connection, messages
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull
from lingvo_gshard.serving.metrics import Metrics
from lingvo_gshard.translation.translator import NBest, Translator, joined

_PAGE = pathlib.Path(__file__).with_name("page.html")
_OPENAPI = _PAGE.with_name("openapi.json")
_MAX_BODY_BYTES = 1 << 20
_RETRY_AFTER = {"Retry-After": "1"}  # In seconds.
_REFUSAL_SECS = 1.0  # Refusals are slow, so that a client without patience costs little.
_CHARS_PER_TOKEN = 4  # Of most languages; others have fewer.


class Server:
    """The handlers of an application that serves one translator at a time."""

    def __init__(
        self,
        translator: Translator,
        limits: Limits | None = None,
        load: Callable[[], Translator] | None = None,
        client_header: str | None = None,
    ) -> None:
        """Makes the handlers.

        Args:
          translator: Serves first.
          limits: The sizes of requests and queues.
          load: Returns the next translator, at SIGHUP. None keeps the first one.
          client_header: The header in which a proxy names the clients, such as X-Forwarded-For.
        """
        self._translator = translator
        self._limits = limits or Limits()
        self._load = load
        self._client_header = client_header
        self._is_ready = False
        self._metrics = Metrics(lambda: self._batcher.queued_tokens)
        self._batcher = Batcher(self._limits, self._metrics.count_batch)

    def app(self) -> web.Application:
        """Returns the application. The translator's threads run as long as it does."""
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[self._count_requests, messages.answered]
        )
        # Contexts end in reverse order: first no model is loaded any more, then the batcher stops.
        app.cleanup_ctx.append(lambda _: self._batcher)  # type: ignore[arg-type]
        app.cleanup_ctx.append(self._loading)

        app.router.add_get("/", lambda _: _file(_PAGE))
        app.router.add_get("/openapi.json", lambda _: _file(_OPENAPI))
        app.router.add_post("/translate", self._translate)
        app.router.add_get("/languages", self._languages)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/health", self._health)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics.handler())
        return app

    # --- the model ---

    async def _loading(self, app: web.Application) -> AsyncIterator[None]:
        """Loads models in the background while the application runs."""
        hangup = asyncio.Event()
        if self._load is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)

        task = asyncio.create_task(self._load_models(hangup))
        yield
        task.cancel()

    async def _load_models(self, hangup: asyncio.Event) -> None:
        """Compiles the first translator's programs; at each signal, exchanges it for the next one.

        Requests that were split for the old one keep it.
        """
        await self._exchange(lambda: self._translator)
        while self._load is not None:
            await hangup.wait()
            hangup.clear()
            await self._exchange(self._load)

    async def _exchange(self, load: Callable[[], Translator]) -> None:
        """Serves what `load` returns, once its programs are compiled; if it fails, the old one."""
        try:
            translator = await asyncio.to_thread(load)
            await asyncio.to_thread(translator.decoder.compile)
        except Exception as error:
            problem = messages.one_line(error)
            logging.error("serving: not loaded, the old model is kept: %s", problem)
            self._metrics.count_load(is_loaded=False)
            return

        self._translator = translator
        self._is_ready = True
        self._metrics.count_load(is_loaded=True)
        with contextlib.suppress(OSError):  # Standard output may have no reader any longer.
            print(f"Loaded {translator.spec.model}", flush=True)

    # --- the handlers ---

    async def _languages(self, request: web.Request) -> web.StreamResponse:
        spec = self._translator.spec
        return web.json_response({"languages": spec.source_languages, "targets": spec.targets})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        spec = self._translator.spec
        return web.json_response({"model": spec.model, "num_best": spec.num_best})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        if not self._is_ready:
            reason = "The programs are not yet compiled."
            raise web.HTTPServiceUnavailable(text=reason, headers=_RETRY_AFTER)
        if self._batcher.queued_tokens >= self._limits.queued_tokens:
            raise web.HTTPServiceUnavailable(text="The queue is full.", headers=_RETRY_AFTER)
        return web.json_response({"ready": True})

    async def _translate(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic()

        is_plain = request.content_type == "text/plain"
        if is_plain:
            lines = _plain_lines(await messages.text_body(request, "replace"))
            nbest = 1
        else:
            body = await messages.json_body(request)
            lines, nbest = messages.asked(body, self._translator.spec)

        # From here on, the request keeps its translator, whatever is loaded meanwhile.
        translator = self._translator

        # A model of several targets reads the wanted one from a token at the line's beginning.
        try:
            beginning = translator.spec.beginning(request.query.get("target_lang"))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        lines = [beginning + line for line in lines]

        try:
            translations = await self._translated(self._client(request), translator, lines)
        except asyncio.QueueFull as error:
            await asyncio.sleep(_REFUSAL_SECS)
            is_own_fault = isinstance(error, ShareFull)
            refused = web.HTTPTooManyRequests if is_own_fault else web.HTTPServiceUnavailable
            raise refused(text=str(error), headers=_RETRY_AFTER) from error

        self._metrics.lines.inc(len(lines))
        self._metrics.translate_secs.observe(time.monotonic() - began)
        if is_plain:
            return web.Response(text="".join(best.text + "\n" for best, *_ in translations))
        return web.json_response({"translations": _as_json(translations, nbest)})

    async def _translated(
        self, client: str, translator: Translator, lines: list[str]
    ) -> list[NBest]:
        """Returns the n best translations of each line.

        Raises HTTPRequestEntityTooLarge, or asyncio.QueueFull as Batcher.check_room. Tokens are
        counted, and lines split, only if they may find room, as both take their time.
        """
        # A first estimate, which costs nothing.
        num_chars = sum(len(line) for line in lines)
        self._batcher.check_room(client, num_chars // _CHARS_PER_TOKEN)

        # Other requests are answered while a thread tokenizes.
        tokens = await asyncio.to_thread(translator.num_tokens, lines)
        self._check_size(tokens)
        self._batcher.check_room(client, sum(tokens))

        parts_by_line = await asyncio.to_thread(lambda: [translator.parts(line) for line in lines])
        all_parts = list(itertools.chain.from_iterable(parts_by_line))
        translations = await self._batcher.submit(client, translator, all_parts)
        return joined(parts_by_line, translations)

    def _client(self, request: web.Request) -> str:
        """Returns the last entry of the header, which the proxy has added, or the address."""
        named = ""
        if self._client_header:
            entries = ",".join(request.headers.getall(self._client_header, ())).split(",")
            named = entries[-1].strip()
        return named or request.remote or ""

    def _check_size(self, tokens: list[int]) -> None:
        """Raises HTTPRequestEntityTooLarge if a line or all lines have too many tokens."""
        _check_at_most("line", max(tokens, default=0), self._limits.line_tokens)
        _check_at_most("request", sum(tokens), self._limits.request_tokens)

    @web.middleware
    async def _count_requests(
        self, request: web.Request, handler: messages.Handler
    ) -> web.StreamResponse:
        response = await handler(request)
        # The route's path: what clients invent must not become ever more metrics.
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        self._metrics.count_request(path, response.status)
        return response


async def _file(path: pathlib.Path) -> web.StreamResponse:
    return web.FileResponse(path)


def _plain_lines(text: str) -> list[str]:
    """Returns the lines of a text, which end only at newlines, as on `translate`'s input."""
    if not text:
        return []
    return text.removesuffix("\n").split("\n")


def _as_json(translations: list[NBest], nbest: int) -> list[list[dict[str, Any]]]:
    """Returns the first `nbest` translations of each line as JSON-able values."""
    lines = []
    for best in translations:
        lines.append([dataclasses.asdict(translation) for translation in best[:nbest]])
    return lines


def _check_at_most(what: str, tokens: int, limit: int) -> None:
    if tokens > limit:
        text = f"A {what} can have at most {limit} tokens, got {tokens}; split it."
        raise web.HTTPRequestEntityTooLarge(limit, tokens, text=text)


def serve(
    translator: Translator,
    host: str,
    port: int,
    *,
    limits: Limits | None = None,
    load: Callable[[], Translator] | None = None,
    client_header: str | None = None,
) -> None:
    """Serves until interrupted; the options are a Server's.

    Port 0 takes a free one. Raises ValueError if the port can't be had.
    """
    # The socket is made here, so that a port that is taken is reported before anything starts.
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"--port={port} on {host}: {error.strerror or error}.") from error

    name = f"[{host}]" if is_ipv6 else host
    port = listener.getsockname()[1]
    print(f"Serving {translator.spec.model} on http://{name}:{port}", flush=True)

    logging.getLogger("aiohttp.access").setLevel(logging.INFO)
    server = Server(translator, limits, load, client_header)
    connection.run(server.app(), listener)
