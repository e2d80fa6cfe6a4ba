"""Translation over HTTP.

    GET  /            a page with a form
    POST /translate   {"lines": ["Guten Tag"], "nbest": 2, "source_lang": "de"}; only lines are
                      required -> {"translations": [[{"text", "score", "num_tokens", ...}, ...]]};
                      or text/plain -> text/plain, one line for each line. A model of several
                      target languages needs /translate?target_lang=de, too
    GET  /languages   the codes of the languages, and of the targets that can be chosen
    GET  /health      200 while the server is up
    GET  /metrics     for Prometheus

Errors are answered as {"error": ...}, with status 400 for a wrong request, 413 for one that is too
large, 415 for one of another type, and 503 if the queue is full and the client should retry.
"""

import asyncio
import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from lingvo_gshard.decode.bundle import DecoderSpec
from lingvo_gshard.decode.translator import Translator
from lingvo_gshard.serving.batcher import Batcher, Limits

_PAGE = pathlib.Path(__file__).with_name("page.html")
_MAX_BODY_BYTES = 1 << 20
_RETRY_AFTER = {"Retry-After": "1"}  # In seconds.
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The handlers of an application that serves one translator."""

    def __init__(
        self, translator: Translator, spec: DecoderSpec, limits: Limits | None = None
    ) -> None:
        self._spec, self._limits = spec, limits or Limits()
        self._batcher = Batcher(lambda lines: list(translator.translate(lines)), self._limits)
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "requests", "Responses by path and status.", ["path", "status"], registry=registry
        )
        self._lines = Counter("lines", "Lines translated.", registry=registry)
        self._secs = Histogram("translate_seconds", "From request to response.", registry=registry)
        queued = Gauge("queued_lines", "Lines in the queue.", registry=registry)
        queued.set_function(lambda: self._batcher.queued_lines)

    def app(self) -> web.Application:
        """Returns the application. The translator's thread runs as long as it does."""
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[self._count_requests, _errors_as_json]
        )
        app.cleanup_ctx.append(lambda _: self._batcher)  # type: ignore[arg-type]
        app.router.add_get("/", _page)
        app.router.add_post("/translate", self._translate)
        app.router.add_get("/languages", self._languages)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", make_aiohttp_handler(self._registry))
        return app

    async def _languages(self, request: web.Request) -> web.StreamResponse:
        spec = self._spec
        return web.json_response({"languages": spec.source_languages, "targets": spec.targets})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"model": self._spec.model, "num_best": self._spec.num_best})

    async def _translate(self, request: web.Request) -> web.StreamResponse:
        began, plain = time.monotonic(), request.content_type == "text/plain"
        if plain:
            lines, nbest = _plain_lines(await request.read()), 1
        else:
            lines, nbest = self._parse(await _json(request))
        try:
            beginning = self._spec.beginning(request.query.get("target_lang"))
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        lines = [beginning + line for line in lines]
        limit = self._limits.queued_lines
        if len(lines) > limit:
            text = f"A request can have at most {limit} lines, got {len(lines)}."
            raise web.HTTPRequestEntityTooLarge(limit, len(lines), text=text)
        try:
            found = await self._batcher.submit(lines)
        except asyncio.QueueFull as error:
            raise web.HTTPServiceUnavailable(text=str(error), headers=_RETRY_AFTER) from error
        self._lines.inc(len(lines))
        self._secs.observe(time.monotonic() - began)
        if plain:
            return web.Response(text="".join(best.text + "\n" for best, *_ in found))
        translations = [[dataclasses.asdict(one) for one in of_line[:nbest]] for of_line in found]
        return web.json_response({"translations": translations})

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
            raise web.HTTPBadRequest(text=f"nbest: expected 1 to {most}, got {nbest!r}.")
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
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answers errors as JSON, with their status."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {k: v for k, v in error.headers.items() if k in ("Retry-After", "Allow")}
        return web.json_response({"error": error.text}, status=error.status, headers=kept)
    except Exception:
        logging.exception("serving: %s %s", request.method, request.path)
        return web.json_response({"error": "The translation failed."}, status=500)


async def _page(request: web.Request) -> web.StreamResponse:
    return web.FileResponse(_PAGE)


def _plain_lines(body: bytes) -> list[str]:
    # Lines end only at newlines, as on the standard input of `translate`.
    text = body.decode("utf-8", errors="replace").removesuffix("\n")
    return text.split("\n") if body else []


async def _json(request: web.Request) -> Any:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Expected application/json or text/plain.")
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"The body is not JSON: {error}.") from error


def serve(translator: Translator, spec: DecoderSpec, host: str, port: int) -> None:
    """Serves until interrupted."""
    print(f"Serving {spec.model} on http://{host}:{port}", flush=True)
    app = Server(translator, spec).app()
    # The lines of clients that disconnect while waiting are not translated.
    web.run_app(app, host=host, port=port, print=None, handler_cancellation=True)
