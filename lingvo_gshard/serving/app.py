"""Translation over HTTP.

    GET  /            a page with a form
    POST /translate   {"lines": ["Guten Tag"], "nbest": 2, "source_lang": "de"}; only lines are
                      required -> {"translations": [[{"text", "score", "num_tokens", ...}, ...]]};
                      or text/plain -> text/plain, one line for each line. A model of several
                      target languages needs /translate?target_lang=de, too
    GET  /languages      the codes of the languages, and of the targets that can be chosen
    GET  /healthz        200 while the server is up, also as /health
    GET  /readyz         200 once it has translated a first batch and while its queue has room
    GET  /metrics        for Prometheus
    GET  /openapi.json   all of this as an OpenAPI description

Errors are answered as {"error": ...}, with status 400 for a wrong request, 413 for one that is too
large, 415 for one of another type, 429 if too much of this client waits already, and 503 if the
queue is full and the client should retry. Clients are told apart by their addresses. Every answer
has an X-Request-Id, which is the request's own if it has one, and which the log names.
"""

import asyncio
import dataclasses
import json
import logging
import pathlib
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from lingvo_gshard.decode.bundle import DecoderSpec
from lingvo_gshard.decode.translator import Translator
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull

_PAGE = pathlib.Path(__file__).with_name("page.html")
_OPENAPI = _PAGE.with_name("openapi.json")
_MAX_BODY_BYTES = 1 << 20
_REQUEST_ID = "X-Request-Id"
_ID = web.RequestKey("id", str)
_LOG_FORMAT = f'%a %{{{_REQUEST_ID}}}o "%r" %s %b bytes %Tf s'
_RETRY_AFTER = {"Retry-After": "1"}  # In seconds.
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The handlers of an application that serves one translator."""

    def __init__(
        self, translator: Translator, spec: DecoderSpec, limits: Limits | None = None
    ) -> None:
        self._spec, self._limits = spec, limits or Limits()
        self._num_tokens, warm_up = translator.num_tokens, translator.warm_up
        translate = translator.translate_together
        self._batcher = Batcher(translate, self._limits, warm_up)
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "requests", "Responses by path and status.", ["path", "status"], registry=registry
        )
        self._lines = Counter("lines", "Lines translated.", registry=registry)
        self._secs = Histogram("translate_seconds", "From request to response.", registry=registry)
        self._tokens = Counter("tokens", "Source tokens translated.", registry=registry)
        queued = Gauge("queued_tokens", "Source tokens in the queue.", registry=registry)
        queued.set_function(lambda: self._batcher.queued_tokens)

    def app(self) -> web.Application:
        """Returns the application. The translator's thread runs as long as it does."""
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES,
            middlewares=[_identified, self._count_requests, _errors_as_json],
        )
        app.cleanup_ctx.append(lambda _: self._batcher)  # type: ignore[arg-type]
        app.router.add_get("/", lambda _: _file(_PAGE))
        app.router.add_get("/openapi.json", lambda _: _file(_OPENAPI))
        app.router.add_post("/translate", self._translate)
        app.router.add_get("/languages", self._languages)
        app.router.add_get("/health", self._health)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", make_aiohttp_handler(self._registry))
        return app

    async def _languages(self, request: web.Request) -> web.StreamResponse:
        spec = self._spec
        return web.json_response({"languages": spec.source_languages, "targets": spec.targets})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"model": self._spec.model, "num_best": self._spec.num_best})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        if not self._batcher.is_ready:
            raise web.HTTPServiceUnavailable(text="The first batch is not yet translated.")
        if self._batcher.queued_tokens >= self._limits.queued_tokens:
            raise web.HTTPServiceUnavailable(text="The queue is full.", headers=_RETRY_AFTER)
        return web.json_response({"ready": True})

    async def _translate(self, request: web.Request) -> web.StreamResponse:
        began, plain = time.monotonic(), request.content_type == "text/plain"
        if plain:
            lines, nbest = _plain_lines(await _text(request, "replace")), 1
        else:
            lines, nbest = self._parse(await _json(request))
        try:
            beginning = self._spec.beginning(request.query.get("target_lang"))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        lines = [beginning + line for line in lines]
        tokens = await self._counted(lines)
        try:
            found = await self._batcher.submit(request.remote or "", lines, tokens)
        except ShareFull as error:
            raise web.HTTPTooManyRequests(text=str(error), headers=_RETRY_AFTER) from error
        except asyncio.QueueFull as error:
            raise web.HTTPServiceUnavailable(text=str(error), headers=_RETRY_AFTER) from error
        self._lines.inc(len(lines))
        self._tokens.inc(sum(tokens))
        self._secs.observe(time.monotonic() - began)
        if plain:
            return web.Response(text="".join(best.text + "\n" for best, *_ in found))
        translations = [[dataclasses.asdict(one) for one in of_line[:nbest]] for of_line in found]
        return web.json_response({"translations": translations})

    async def _counted(self, lines: list[str]) -> list[int]:
        """Returns each line's number of tokens; HTTPRequestEntityTooLarge for too many."""
        tokens, limits = await asyncio.to_thread(self._num_tokens, lines), self._limits
        for what, found, most in (
            ("line", max(tokens, default=0), limits.line_tokens),
            ("request", sum(tokens), limits.request_tokens),
        ):
            if found > most:
                text = f"A {what} can have at most {most} tokens, got {found}; split it."
                raise web.HTTPRequestEntityTooLarge(most, found, text=text)
        return tokens

    def _parse(self, body: Any) -> tuple[list[str], int]:
        """Returns the lines of a request and the number of translations for each."""
        lines = body.get("lines") if isinstance(body, dict) else None
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise web.HTTPBadRequest(text='Expected {"lines": [...]}, a list of strings.')
        # UTF-8 can't encode half a character, which a JSON string can contain.
        if any("\ud800" <= letter <= "\udfff" for line in lines for letter in line):
            raise web.HTTPBadRequest(text="lines: a surrogate without its other half is not text.")
        known = ["lines", "nbest", "source_lang"]
        if unknown := ", ".join(sorted(set(body) - set(known))):
            raise web.HTTPBadRequest(text=f"Unknown {unknown}, expected {', '.join(known)}.")
        nbest, most = body.get("nbest", 1), self._spec.num_best
        if type(nbest) is not int or not 1 <= nbest <= most:
            problem = f"nbest: expected 1 to {most}, got {nbest!r}."
            if most == 1:
                problem = f"nbest: this server returns one translation a line, not {nbest!r}."
            raise web.HTTPBadRequest(text=problem)
        language, codes = body.get("source_lang"), self._spec.source_languages
        if language is not None and language not in codes:
            expected = f"expected one of {', '.join(codes)}"
            raise web.HTTPBadRequest(text=f"source_lang: {expected}, got {language!r}.")
        return lines, nbest

    @web.middleware
    async def _count_requests(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        self._requests.labels(path, response.status).inc()
        return response


@web.middleware
async def _identified(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Gives a request an id and the answer the same."""
    given = request.headers.get(_REQUEST_ID, "")
    request[_ID] = given if re.fullmatch(r"[\w.-]{1,64}", given) else uuid.uuid4().hex
    response = await handler(request)
    response.headers[_REQUEST_ID] = request[_ID]
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answers errors as JSON, with their status."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {k: v for k, v in error.headers.items() if k in ("Retry-After", "Allow")}
        return web.json_response({"error": error.text}, status=error.status, headers=kept)
    except Exception:
        where = request.method, request.path, request[_ID]
        logging.exception("serving: %s %s, request %s", *where)
        return web.json_response({"error": "The translation failed."}, status=500)


def _unparsed(
    handler: web.RequestHandler,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
) -> web.StreamResponse:
    """Answers what is no HTTP that aiohttp understands, which no middleware sees."""
    logging.warning("serving: no request from %s: %r", request.remote, exc)
    reason = " ".join((message or "The server failed.").split())
    response = web.json_response({"error": reason}, status=status)
    response.force_close()
    return response


web.RequestHandler.handle_error = _unparsed  # type: ignore[method-assign, assignment]


async def _file(path: pathlib.Path) -> web.StreamResponse:
    return web.FileResponse(path)


def _plain_lines(text: str) -> list[str]:
    # Lines end only at newlines, as on the standard input of `translate`.
    return text.removesuffix("\n").split("\n") if text else []


async def _json(request: web.Request) -> Any:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Expected application/json or text/plain.")
    try:
        return json.loads(await _text(request, "strict"))
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(text=f"The body is not JSON: {error}.") from error


async def _text(request: web.Request, errors: str) -> str:
    try:
        return (await request.read()).decode(request.charset or "utf-8", errors)
    except LookupError as error:
        raise web.HTTPUnsupportedMediaType(text=f"{error}.") from error
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text=f"The body cannot be read: {error}.") from error


def serve(translator: Translator, spec: DecoderSpec, host: str, port: int) -> None:
    """Serves until interrupted. Raises ValueError if it cannot listen on the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"--serve={port} on {host}: {error.strerror or error}.") from error
    name = f"[{host}]" if ":" in host else host
    print(f"Serving {spec.model} on http://{name}:{listener.getsockname()[1]}", flush=True)
    logging.getLogger("aiohttp.access").setLevel(logging.INFO)
    web.run_app(
        Server(translator, spec).app(),
        sock=listener,
        print=None,
        access_log_format=_LOG_FORMAT,
        handler_cancellation=True,  # A client that hangs up is not translated for.
    )
