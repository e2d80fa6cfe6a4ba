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

Errors are answered as {"error": ...}, with status 400 for a wrong request, 408 for a body that does
not arrive, 413 for one that is too large, 415 for one of another type, 429 if too much of this
client waits already, 500 if the translation fails, and 503 if the queue is full and the client
should retry. A client is an address, or what a proxy's header names. Every answer has an
X-Request-Id, which is the request's own if it has one, and which the log names.
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
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.aiohttp import make_aiohttp_handler

from lingvo_gshard.serving import messages
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull
from lingvo_gshard.translation.translator import Part, Translator, joined

_PAGE = pathlib.Path(__file__).with_name("page.html")
_OPENAPI = _PAGE.with_name("openapi.json")
_MAX_BODY_BYTES = 1 << 20
_LOG_FORMAT = f'%a %{{{messages.REQUEST_ID}}}o "%r" %s %b bytes %Tf s'
_RETRY_AFTER = {"Retry-After": "1"}  # In seconds.
_IDLE_SECS = 75.0  # A connection without a whole request for so long is closed.
_REFUSAL_SECS = 1.0  # Refusals are slow, so that a client without patience costs little.
_CHARS_PER_TOKEN = 4  # Of most languages; others have fewer.
_SECS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)  # A histogram's bounds.


class Server:
    """The handlers of an application that serves one translator at a time."""

    def __init__(
        self,
        translator: Translator,
        limits: Limits | None = None,
        load: Callable[[], Translator] | None = None,
        client_header: str | None = None,
    ) -> None:
        """`load` returns the next translator, at SIGHUP. `client_header` names the clients."""
        self._translator, self._limits = translator, limits or Limits()
        self._load, self._client_header, self._is_ready = load, client_header, False
        self._batcher = Batcher(self._limits, self._count_batch)
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("requests", "Answers.", ["path", "status"], registry=registry)
        self._lines = Counter("lines", "Lines translated.", registry=registry)
        self._tokens = Counter("tokens", "Source tokens translated.", registry=registry)
        self._loads = Counter("loads", "Models, at SIGHUP, too.", ["outcome"], registry=registry)
        sizes = [2**i for i in range(10)]
        self._rows = Histogram("batch_rows", "Rows in use.", buckets=sizes, registry=registry)
        latency = "From request to response."
        self._secs = Histogram("translate_seconds", latency, buckets=_SECS, registry=registry)
        queued = Gauge("queued_tokens", "Source tokens in the queue.", registry=registry)
        queued.set_function(lambda: self._batcher.queued_tokens)

    def app(self) -> web.Application:
        """Returns the application. The translator's thread runs as long as it does."""
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[self._count_requests, messages.answered]
        )
        app.cleanup_ctx.append(lambda _: self._batcher)  # type: ignore[arg-type]
        app.cleanup_ctx.append(self._loading)
        app.router.add_get("/", lambda _: _file(_PAGE))
        app.router.add_get("/openapi.json", lambda _: _file(_OPENAPI))
        app.router.add_post("/translate", self._translate)
        app.router.add_get("/languages", self._languages)
        for path in ("/healthz", "/health"):
            app.router.add_get(path, self._health)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", make_aiohttp_handler(self._registry))
        return app

    async def _loading(self, app: web.Application) -> AsyncIterator[None]:
        hangup = asyncio.Event()
        if self._load:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
        task = asyncio.create_task(self._load_again(hangup))
        yield
        task.cancel()

    async def _load_again(self, hangup: asyncio.Event) -> None:
        """Compiles the translator's programs, and at each signal exchanges it for the next one.

        Requests that were split for the old one keep it.
        """
        for load in itertools.chain([None], itertools.repeat(self._load)):
            try:
                translator = await asyncio.to_thread(load) if load else self._translator
                await asyncio.to_thread(translator.decoder.compile)
            except Exception as error:
                logging.error(
                    "serving: not loaded, the old model is kept: %s", messages.one_line(error)
                )
                self._loads.labels("refused").inc()
            else:
                self._translator, self._is_ready = translator, True
                self._loads.labels("loaded").inc()
                with contextlib.suppress(OSError):  # It may have no reader any longer.
                    print(f"Loaded {translator.spec.model}", flush=True)
            await hangup.wait()
            hangup.clear()

    def _count_batch(self, parts: list[Part]) -> None:
        self._rows.observe(len(parts))
        self._tokens.inc(sum(len(part.ids) for part in parts))

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
        began, plain = time.monotonic(), request.content_type == "text/plain"
        if plain:
            # Lines end only at newlines, as on the standard input of `translate`.
            text = await messages.text_body(request, "replace")
            lines, nbest = text.removesuffix("\n").split("\n") if text else [], 1
        else:
            lines, nbest = messages.asked(await messages.json_body(request), self._translator.spec)
        translator = self._translator
        try:
            beginning = translator.spec.beginning(request.query.get("target_lang"))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        lines = [beginning + line for line in lines]
        client = self._client(request)
        try:
            # Tokens are counted, and lines split, only if they may fit, as both take their time.
            self._batcher.check_room(client, sum(map(len, lines)) // _CHARS_PER_TOKEN)
            tokens = await asyncio.to_thread(translator.num_tokens, lines)
            self._check_size(tokens)
            self._batcher.check_room(client, sum(tokens))
            parts = await asyncio.to_thread(lambda: list(map(translator.parts, lines)))
            waiting = self._batcher.submit(client, translator, list(itertools.chain(*parts)))
            of_parts = iter(await waiting)
        except asyncio.QueueFull as error:
            await asyncio.sleep(_REFUSAL_SECS)
            own = isinstance(error, ShareFull)
            refused = web.HTTPTooManyRequests if own else web.HTTPServiceUnavailable
            raise refused(text=str(error), headers=_RETRY_AFTER) from error
        found = [joined([next(of_parts) for _ in of_line]) for of_line in parts]
        self._lines.inc(len(lines))
        self._secs.observe(time.monotonic() - began)
        if plain:
            return web.Response(text="".join(best.text + "\n" for best, *_ in found))
        translations = [[dataclasses.asdict(one) for one in of_line[:nbest]] for of_line in found]
        return web.json_response({"translations": translations})

    def _client(self, request: web.Request) -> str:
        """Returns the last entry of the header, which the proxy has added, or the address."""
        header = self._client_header
        named = ",".join(request.headers.getall(header, ())) if header else ""
        return named.rpartition(",")[2].strip() or request.remote or ""

    def _check_size(self, tokens: list[int]) -> None:
        """Raises HTTPRequestEntityTooLarge if the lines have too many tokens."""
        limits = self._limits
        for what, found, most in (
            ("line", max(tokens, default=0), limits.line_tokens),
            ("request", sum(tokens), limits.request_tokens),
        ):
            if found > most:
                text = f"A {what} can have at most {most} tokens, got {found}; split it."
                raise web.HTTPRequestEntityTooLarge(most, found, text=text)

    @web.middleware
    async def _count_requests(
        self, request: web.Request, handler: messages.Handler
    ) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        self._requests.labels(path, response.status).inc()
        return response


async def _file(path: pathlib.Path) -> web.StreamResponse:
    return web.FileResponse(path)


def serve(translator: Translator, host: str, port: int, **options: Any) -> None:
    """Serves until interrupted, with a Server's options; ValueError if the port can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"--serve={port} on {host}: {error.strerror or error}.") from error
    name = f"[{host}]" if ":" in host else host
    port = listener.getsockname()[1]
    print(f"Serving {translator.spec.model} on http://{name}:{port}", flush=True)
    logging.getLogger("aiohttp.access").setLevel(logging.INFO)
    web.run_app(
        Server(translator, **options).app(),
        sock=listener,
        print=None,
        access_log_format=_LOG_FORMAT,
        keepalive_timeout=_IDLE_SECS,
        handler_cancellation=True,  # A client that hangs up is not translated for.
    )
