"""Translations, or continuations of prompts, over HTTP.

    GET  /            a page with a form
    POST /translate   {"lines": ["Guten Tag"], "nbest": 2, "source_lang": "de"}; only lines are
                      required -> {"translations": [[{"text", "score", "num_tokens", ...}, ...]]};
                      or text/plain -> text/plain, one line for each line. A model of several
                      target languages needs target_lang, and one with tokens of languages both,
                      in the body or as /translate?source_lang=deu_Latn&target_lang=fra_Latn
    POST /generate    of a language model: {"prompts": ["Once"], "nbest": 2, "seed": 7} ->
                      {"continuations": ...} of the same form, and text/plain as above
    GET  /languages      the codes of the languages, and of the targets that can be chosen
    GET  /healthz        200 while the server is up, also as /health
    GET  /readyz         200 once its programs are compiled and while its queue has room
    GET  /metrics        for Prometheus
    GET  /openapi.json   all of this as an OpenAPI description

Errors are answered as {"error": ...}, with one of these statuses:

    400   the request is wrong
    404   the address is none, or for a model of another kind
    408   the body does not arrive in time
    413   the body, a line or the request is too large
    415   the body has another content type or an unknown charset
    429   too many tokens of this client wait already; the client may retry
    500   decoding failed
    503   the queue is full; the client may retry

A client is an address, or the entry that a proxy adds to a header. Every answer has an
X-Request-Id, which is the request's own if it has a valid one, and which the log contains.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import pathlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from lingvo_gshard.decoding.text_decoder import NBest, Part, TextDecoder
from lingvo_gshard.serving import connection, messages
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull
from lingvo_gshard.serving.messages import Asked, Route
from lingvo_gshard.serving.metrics import Metrics

_PAGE = pathlib.Path(__file__).with_name("page.html")
_OPENAPI = _PAGE.with_name("openapi.json")
_MAX_BODY_BYTES = 1 << 20
_RETRY_AFTER = {"Retry-After": "1"}  # In seconds.
_REFUSAL_SECS = 1.0  # Refusals are slow, so that a client without patience costs little.
_CHARS_PER_TOKEN = 4  # Of most languages; others have fewer.


class Server:
    """The handlers of an application that serves one model at a time."""

    def __init__(
        self,
        text_decoder: TextDecoder,
        limits: Limits | None = None,
        load: Callable[[], TextDecoder] | None = None,
        client_header: str | None = None,
    ) -> None:
        """Makes the handlers.

        Args:
          text_decoder: Serves first.
          limits: The sizes of requests and queues.
          load: Returns the next text decoder, at SIGHUP. None keeps the first one.
          client_header: The header in which a proxy names the clients, such as X-Forwarded-For.
        """
        self._text_decoder = text_decoder
        self._limits = limits or Limits()
        self._load = load
        self._client_header = client_header
        self._is_ready = False
        self._metrics = Metrics(lambda: self._batcher.queued_tokens)
        self._batcher = Batcher(self._limits, self._metrics.count_batch)

    def app(self) -> web.Application:
        """Returns the application. Its threads run as long as it does."""
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[self._count_requests, messages.answered]
        )
        # Contexts end in reverse order: first no model is loaded any more, then the batcher stops.
        app.cleanup_ctx.append(lambda _: self._batcher)  # type: ignore[arg-type]
        app.cleanup_ctx.append(self._loading)

        app.router.add_get("/", lambda _: _file(_PAGE))
        app.router.add_get("/openapi.json", lambda _: _file(_OPENAPI))
        for route in messages.ROUTES:
            app.router.add_post(route.path, functools.partial(self._decode, route))
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
        """Compiles the first model's programs; at each signal, exchanges it for the next one.

        Requests that were split for the old one keep it.
        """
        await self._exchange(lambda: self._text_decoder)
        while self._load is not None:
            await hangup.wait()
            hangup.clear()
            await self._exchange(self._load)

    async def _exchange(self, load: Callable[[], TextDecoder]) -> None:
        """Serves what `load` returns, once its programs are compiled; if it fails, the old one."""
        try:
            text_decoder = await asyncio.to_thread(load)
            await asyncio.to_thread(text_decoder.decoder.compile)
        except Exception as error:
            problem = messages.one_line(error)
            logging.error("serving: not loaded, the old model is kept: %s", problem)
            self._metrics.count_load(is_loaded=False)
            return

        self._text_decoder = text_decoder
        self._is_ready = True
        self._metrics.count_load(is_loaded=True)
        with contextlib.suppress(OSError):  # Standard output may have no reader any longer.
            print(f"Loaded {text_decoder.spec.model}", flush=True)

    # --- the handlers ---

    async def _languages(self, request: web.Request) -> web.StreamResponse:
        spec = self._text_decoder.spec
        languages = {
            "languages": spec.source_languages,
            "targets": spec.targets,
            "named_sources": bool(spec.sources),
        }
        return web.json_response(languages)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        spec = self._text_decoder.spec
        facts = {"model": spec.model, "num_best": spec.num_best, "kind": spec.kind}
        return web.json_response(facts)

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        if not self._is_ready:
            reason = "The programs are not yet compiled."
            raise web.HTTPServiceUnavailable(text=reason, headers=_RETRY_AFTER)
        if self._batcher.queued_tokens >= self._limits.queued_tokens:
            raise web.HTTPServiceUnavailable(text="The queue is full.", headers=_RETRY_AFTER)
        return web.json_response({"ready": True})

    async def _decode(self, route: Route, request: web.Request) -> web.StreamResponse:
        began = time.monotonic()

        # From here on, the request keeps its model, whatever is loaded meanwhile.
        text_decoder = self._text_decoder
        messages.check_route(route, text_decoder.spec)

        is_plain = request.content_type == "text/plain"
        if is_plain:
            asked = Asked(_plain_lines(await messages.text_body(request, "replace")))
        else:
            asked = messages.asked(await messages.json_body(request), text_decoder.spec, route)

        # A model of several languages reads the wanted ones from a line's beginning.
        beginning = messages.beginning(request.query, asked, text_decoder.spec)
        lines = [beginning + line for line in asked.lines]

        try:
            results = await self._decoded(self._client(request), text_decoder, lines, asked.seed)
        except asyncio.QueueFull as error:
            await asyncio.sleep(_REFUSAL_SECS)
            is_own_fault = isinstance(error, ShareFull)
            refused = web.HTTPTooManyRequests if is_own_fault else web.HTTPServiceUnavailable
            raise refused(text=str(error), headers=_RETRY_AFTER) from error

        self._metrics.lines.inc(len(lines))
        self._metrics.answer_secs.observe(time.monotonic() - began)
        if is_plain:
            return web.Response(text="".join(best.text + "\n" for best, *_ in results))
        return web.json_response({route.results: _as_json(results, asked.nbest)})

    async def _decoded(
        self, client: str, text_decoder: TextDecoder, lines: list[str], seed: int
    ) -> list[NBest]:
        """Returns the n best results of each line.

        Raises HTTPRequestEntityTooLarge, or asyncio.QueueFull as Batcher.check_room. Tokens are
        counted, and lines split, only if they may find room, as both take their time.
        """
        # A first estimate, which costs nothing.
        num_chars = sum(len(line) for line in lines)
        self._batcher.check_room(client, num_chars // _CHARS_PER_TOKEN)

        # Other requests are answered while a thread tokenizes.
        tokens = await asyncio.to_thread(text_decoder.num_tokens, lines)
        self._check_size(tokens)
        self._batcher.check_room(client, sum(tokens))

        parts_by_line = await asyncio.to_thread(_parts, text_decoder, lines, seed)
        all_parts = list(itertools.chain.from_iterable(parts_by_line))
        results = await self._batcher.submit(client, text_decoder, all_parts)
        return text_decoder.joined(parts_by_line, results)

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


def _parts(text_decoder: TextDecoder, lines: list[str], seed: int) -> list[list[Part]]:
    """Returns the parts of each line; HTTPRequestEntityTooLarge for one that is too long."""
    parts_by_line = []
    for number, line in enumerate(lines, start=1):
        try:
            parts_by_line.append(text_decoder.parts(line, number, seed))
        except ValueError as error:
            raise web.HTTPRequestEntityTooLarge(0, text=str(error)) from error
    return parts_by_line


def _plain_lines(text: str) -> list[str]:
    """Returns the lines of a text, which end only at newlines, as on the input of programs."""
    if not text:
        return []
    return text.removesuffix("\n").split("\n")


def _as_json(results: list[NBest], nbest: int) -> list[list[dict[str, Any]]]:
    """Returns the first `nbest` results of each line as JSON-able values."""
    lines = []
    for best in results:
        lines.append([dataclasses.asdict(hypothesis) for hypothesis in best[:nbest]])
    return lines


def _check_at_most(what: str, tokens: int, limit: int) -> None:
    if tokens > limit:
        text = f"A {what} can have at most {limit} tokens, got {tokens}; split it."
        raise web.HTTPRequestEntityTooLarge(limit, tokens, text=text)


def serve(
    text_decoder: TextDecoder,
    host: str,
    port: int,
    *,
    limits: Limits | None = None,
    load: Callable[[], TextDecoder] | None = None,
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
    print(f"Serving {text_decoder.spec.model} on http://{name}:{port}", flush=True)

    logging.getLogger("aiohttp.access").setLevel(logging.INFO)
    server = Server(text_decoder, limits, load, client_header)
    connection.run(server.app(), listener)
