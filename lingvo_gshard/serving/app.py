"""Translation over HTTP.

    GET  /            a page to type in
    POST /translate   {"lines": ["Guten Tag"], "nbest": 2, "source_lang": "de"}, all but lines
                      optional -> {"translations": [[{"text", "score", "num_tokens", ...}, ...]]};
                      or text/plain, a line a line
    GET  /languages   codes of the languages
    GET  /health      200 while it serves
    GET  /metrics     for Prometheus

What is wrong with a request is told in {"error": ...}: 400 what it asks, 413 its size, 415 its
type; 503 says to come again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from lingvo_gshard.decode.decoder import DecoderSpec
from lingvo_gshard.decode.translator import Translator
from lingvo_gshard.serving.batcher import Batcher, Limits, NBest, QueueFullError

_PAGE = pathlib.Path(__file__).with_name("page.html")
_MAX_BODY_BYTES = 1 << 20
_RETRY_SECS = 1
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request's lines and how many translations it wants of each."""

    lines: list[str]
    nbest: int


class Server:
    """The application's handlers over one translator."""

    def __init__(
        self, translator: Translator, spec: DecoderSpec, limits: Limits | None = None
    ) -> None:
        """Keeps its parts; `spec` is the translator's decoder's."""
        self._spec, self._limits = spec, limits or Limits()
        self._batcher = Batcher(lambda lines: list(translator.translate(lines)), self._limits)
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "requests", "Answers by path and status.", ["path", "status"], registry=self._registry
        )
        self._lines = Counter("lines", "Lines translated.", registry=self._registry)
        self._secs = Histogram(
            "translate_seconds", "From a request to its answer.", registry=self._registry
        )
        queued = Gauge("queued_lines", "Lines that wait.", registry=self._registry)
        queued.set_function(lambda: self._batcher.queued_lines)

    def app(self) -> web.Application:
        """The application; it translates while it runs."""
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[self._counted, _told_in_json]
        )
        app.cleanup_ctx.append(self._running)
        app.add_routes(
            [
                web.get("/", self._page),
                web.post("/translate", self._translate),
                web.get("/languages", self._languages),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    async def _running(self, app: web.Application):
        async with self._batcher:
            yield

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=_PAGE.read_text(), content_type="text/html")

    async def _languages(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"languages": self._spec.languages})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"model": self._spec.model, "num_best": self._spec.num_best})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _translate(self, request: web.Request) -> web.StreamResponse:
        began, plain = time.monotonic(), request.content_type == "text/plain"
        asked = _plain(await request.read()) if plain else self._json(request, await _body(request))
        size, limit = len(asked.lines), self._limits.queued_lines
        if size > limit:
            raise web.HTTPRequestEntityTooLarge(
                limit, size, text=f"{size} lines; at most {limit} are taken at once."
            )
        try:
            found = await self._batcher.submit(asked.lines)
        except QueueFullError as error:
            raise web.HTTPServiceUnavailable(
                text=str(error), headers={"Retry-After": str(_RETRY_SECS)}
            ) from error
        self._lines.inc(len(asked.lines))
        self._secs.observe(time.monotonic() - began)
        if plain:
            return web.Response(text="".join(best.text + "\n" for best, *_ in found))
        return web.json_response({"translations": _as_json(found, asked.nbest)})

    def _json(self, request: web.Request, body: Any) -> _Asked:
        if not isinstance(body, dict) or not _is_lines(body.get("lines")):
            raise web.HTTPBadRequest(text='{"lines": [...]} is expected, a list of strings.')
        if not all(map(_is_unicode, body["lines"])):
            raise web.HTTPBadRequest(text="lines: a surrogate without its other half is no text.")
        known = ["lines", "nbest", "source_lang"]
        if unknown := ", ".join(sorted(set(body) - set(known))):
            raise web.HTTPBadRequest(text=f"unknown {unknown}; known are {', '.join(known)}.")
        nbest, language = body.get("nbest", 1), body.get("source_lang")
        if type(nbest) is not int or not 1 <= nbest <= self._spec.num_best:
            raise web.HTTPBadRequest(
                text=f"nbest: 1 to {self._spec.num_best} is expected, not {nbest!r}."
            )
        if language is not None and language not in self._spec.languages:
            languages = ", ".join(self._spec.languages)
            raise web.HTTPBadRequest(text=f"source_lang: {language!r} is none of {languages}.")
        return _Asked(body["lines"], nbest)

    @web.middleware
    async def _counted(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        self._requests.labels(path, response.status).inc()
        return response


@web.middleware
async def _told_in_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Whatever goes wrong is answered as JSON, with its status."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        kept = {k: v for k, v in error.headers.items() if k in ("Retry-After", "Allow")}
        return web.json_response({"error": error.text}, status=error.status, headers=kept)
    except Exception:
        logging.exception("serving: %s %s", request.method, request.path)
        return web.json_response({"error": "It could not be translated."}, status=500)


def _plain(body: bytes) -> _Asked:
    # By newlines alone, as `translate` reads its standard input.
    text = body.decode("utf-8", errors="replace").removesuffix("\n")
    return _Asked(text.split("\n") if body else [], nbest=1)


async def _body(request: web.Request) -> Any:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="application/json or text/plain is expected.")
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"The body is no JSON: {error}.") from error


def _is_lines(lines: Any) -> bool:
    return isinstance(lines, list) and all(isinstance(line, str) for line in lines)


def _is_unicode(line: str) -> bool:
    """Whether UTF-8 can write it: JSON can spell half of a character, a surrogate."""
    return not any("\ud800" <= letter <= "\udfff" for letter in line)


def _as_json(found: Sequence[NBest], nbest: int) -> list[list[dict[str, Any]]]:
    return [[dataclasses.asdict(one) for one in of_line[:nbest]] for of_line in found]


def serve(translator: Translator, spec: DecoderSpec, host: str, port: int) -> None:
    """Serves until it is interrupted."""
    print(f"Serving {spec.model} on http://{host}:{port}", flush=True)
    app = Server(translator, spec).app()
    # Whoever hangs up while they wait is not translated for.
    web.run_app(app, host=host, port=port, print=None, handler_cancellation=True)
