"""Translations, or continuations of prompts, over HTTP.

    GET  /            a page with a form
    POST /translate   {"lines": ["Guten Tag"], "nbest": 2, "source_lang": "de"}; only lines are
                      required -> {"translations": [[{"text", "score", "num_tokens", "finish",
                      ...}, ...]]}; or text/plain -> text/plain, one line for each line. A model
                      with several target languages needs target_lang, and one with tokens of
                      languages needs source_lang, too, in the body or in the query:
                      /translate?source_lang=deu_Latn&target_lang=fra_Latn
    POST /generate    for a language model: {"prompts": ["Once"], "nbest": 2, "seed": 7} ->
                      {"continuations": ...} in the same format, and text/plain as above
    POST /libretranslate/translate    see libretranslate.py, as for /libretranslate/languages
    POST /v1/completions              see completions.py, as for /v1/chat/completions, /v1/models
    GET  /languages      the codes of the source languages, and of the targets to choose from
    GET  /healthz        200 while the server is up; also at /health
    GET  /readyz         200 when its programs are compiled and its queue has room
    GET  /metrics        metrics in Prometheus' format
    GET  /openapi.json   all of this as an OpenAPI description

With "token_scores": true a result has its tokens, each with its piece and log-probability.

Errors are answered as {"error": ...}, or under /v1 as {"error": {"message": ...}}, with one of
these statuses:

    400   the request is invalid
    404   the address is unknown, or is for models of another kind
    408   the body does not arrive in time
    413   the body, a line or the request is too large
    415   the body has another content type or an unknown charset
    429   too many tokens of this client are already waiting; the client may retry
    500   decoding failed, or the model's numbers for a line are not finite
    503   the queue is full; the client may retry

A client is identified by its address, or by the entry that a proxy adds to a header. Every answer
has an X-Request-Id, which also appears in the log: the request's own if it is valid, or else a new
one.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import pathlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.outcomes import NoResultError
from lingvo_gshard.decoding.text_decoder import NBest, Part, TextDecoder
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.serving import completions, connection, libretranslate, messages
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull
from lingvo_gshard.serving.messages import Asked, Route
from lingvo_gshard.serving.metrics import Metrics

_PAGE = pathlib.Path(__file__).with_name("page.html")
_OPENAPI = _PAGE.with_name("openapi.json")
_MAX_BODY_BYTES = 1 << 20
_RETRY_AFTER = {"Retry-After": "1"}  # In seconds.
_REFUSAL_SECS = 1.0  # Refusals are delayed, so that an impatient client costs little.
_CHARS_PER_TOKEN = 4  # An average for most languages; some have fewer.


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
          text_decoder: The text decoder that serves first.
          limits: The sizes of requests and queues.
          load: Returns the next text decoder, at SIGHUP. None keeps the first one forever.
          client_header: The header in which a proxy names the clients, such as X-Forwarded-For.
        """
        self._text_decoder = text_decoder
        self._limits = limits or Limits()
        self._load = load
        self._client_header = client_header
        self._is_ready = False
        self._loaded_secs = int(time.time())  # Since 1970.
        self._metrics = Metrics(lambda: self._batcher.queued_tokens)
        self._batcher = Batcher(self._limits, self._metrics.count_batch)

    def app(self) -> web.Application:
        """Returns the application, with threads that run as long as it does."""
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[self._count_requests, messages.answered]
        )
        # Contexts end in reverse order: first the loading of models ends, then the batcher stops.
        app.cleanup_ctx.append(lambda _: self._batcher)  # type: ignore[arg-type]
        app.cleanup_ctx.append(self._loading)

        app.router.add_get("/", lambda _: _file(_PAGE))
        app.router.add_get("/openapi.json", lambda _: _file(_OPENAPI))
        for route in messages.ROUTES:
            app.router.add_post(route.path, functools.partial(self._decode, route))
        app.router.add_get("/languages", self._facts(_languages))
        app.router.add_post(f"{libretranslate.PREFIX}/translate", self._libretranslate)
        app.router.add_get(
            f"{libretranslate.PREFIX}/languages", self._facts(libretranslate.languages)
        )
        app.router.add_post(f"{messages.OPENAI}completions", self._complete)
        app.router.add_post(f"{messages.OPENAI}chat/completions", self._complete_chat)
        app.router.add_get(
            f"{messages.OPENAI}models",
            self._facts(lambda spec: completions.models(spec, self._loaded_secs)),
        )
        app.router.add_get("/healthz", self._facts(_health))
        app.router.add_get("/health", self._facts(_health))
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
        """Compiles the first model's programs; at each signal, replaces it with the next model.

        Requests whose lines were split for the old model keep it.
        """
        await self._exchange(lambda: self._text_decoder)
        while self._load is not None:
            await hangup.wait()
            hangup.clear()
            await self._exchange(self._load)

    async def _exchange(self, load: Callable[[], TextDecoder]) -> None:
        """Serves the loaded model once its programs are compiled; if that fails, the old one."""
        try:
            text_decoder = await asyncio.to_thread(load)
            await asyncio.to_thread(text_decoder.decoder.compile)
        except Exception as error:
            problem = messages.one_line(error)
            logging.error("serving: loading failed, the old model is kept: %s", problem)
            self._metrics.count_load(is_loaded=False)
            return

        self._text_decoder = text_decoder
        self._loaded_secs = int(time.time())
        self._is_ready = True
        self._metrics.count_load(is_loaded=True)
        with contextlib.suppress(OSError):  # Nobody may be reading standard output any longer.
            print(f"Loaded {text_decoder.spec.model}", flush=True)

    # --- the handlers ---

    def _facts(self, facts_of: Callable[[DecoderSpec], Any]) -> messages.Handler:
        """Returns a handler that answers with facts about the model, as JSON."""

        async def answer(request: web.Request) -> web.StreamResponse:
            return web.json_response(facts_of(self._text_decoder.spec))

        return answer

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        if not self._is_ready:
            reason = "The programs are not yet compiled."
            raise web.HTTPServiceUnavailable(text=reason, headers=_RETRY_AFTER)
        if self._batcher.queued_tokens >= self._limits.queued_tokens:
            raise web.HTTPServiceUnavailable(text="The queue is full.", headers=_RETRY_AFTER)
        return web.json_response({"ready": True})

    async def _libretranslate(self, request: web.Request) -> web.StreamResponse:
        text_decoder = self._text_decoder
        messages.check_kind(Kind.PARALLEL, request.path, text_decoder.spec)
        asked = libretranslate.asked(await messages.fields(request), text_decoder.spec)
        results = await self._results(request, text_decoder, asked.lines)
        return web.json_response(libretranslate.answer(asked, results))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        generator, body = await self._generator(request)
        asked = completions.asked(body, generator.spec)
        results = await self._results(request, generator, asked.prompts, asked.seed)
        return _completed(asked, completions.answer(asked, results, generator))

    async def _complete_chat(self, request: web.Request) -> web.StreamResponse:
        generator, body = await self._generator(request)
        asked = completions.asked_chat(body, generator)
        of_chats = generator.of_chats
        results = await self._results(request, of_chats, asked.prompts, asked.seed)
        return _completed(asked, completions.chat_answer(asked, results, of_chats))

    async def _generator(self, request: web.Request) -> tuple[Any, Any]:
        """Returns the language model, which the request keeps, and the request's body."""
        generator = self._text_decoder
        messages.check_kind(Kind.TEXT, request.path, generator.spec)
        return generator, await messages.json_body(request, "application/json")

    async def _decode(self, route: Route, request: web.Request) -> web.StreamResponse:
        # From here on, the request keeps its model, even if another one is loaded meanwhile.
        text_decoder = self._text_decoder
        messages.check_kind(route.kind, route.path, text_decoder.spec)

        is_plain = request.content_type == "text/plain"
        if is_plain:
            # Lines end only at newlines, as in the programs' input.
            text = await messages.text_body(request, "replace")
            asked = Asked(text.removesuffix("\n").split("\n") if text else [])
        else:
            asked = messages.asked(await messages.json_body(request), text_decoder.spec, route)

        # A model of several languages reads the requested ones from a line's beginning.
        beginning = messages.beginning(request.query, asked.languages, text_decoder.spec)
        lines = [beginning + line for line in asked.lines]

        results = await self._results(request, text_decoder, lines, asked.seed)
        if is_plain:
            return web.Response(text="".join(best.text + "\n" for best, *_ in results))
        return web.json_response({route.results: _as_json(results, asked)})

    async def _results(
        self, request: web.Request, text_decoder: TextDecoder, lines: list[str], seed: int = 0
    ) -> list[NBest]:
        """Returns the n best results of each line, and counts them.

        Raises the errors of `_decoded` as HTTPExceptions.
        """
        began = time.monotonic()
        try:
            results = await self._decoded(self._client(request), text_decoder, lines, seed)
        except asyncio.QueueFull as error:
            await asyncio.sleep(_REFUSAL_SECS)
            is_own_fault = isinstance(error, ShareFull)
            refused = web.HTTPTooManyRequests if is_own_fault else web.HTTPServiceUnavailable
            raise refused(text=str(error), headers=_RETRY_AFTER) from error
        except NoResultError as error:
            logging.error("serving: %s", error)
            raise web.HTTPInternalServerError(text=str(error)) from error

        self._metrics.lines.inc(len(lines))
        self._metrics.answer_secs.observe(time.monotonic() - began)
        return results

    async def _decoded(
        self, client: str, text_decoder: TextDecoder, lines: list[str], seed: int
    ) -> list[NBest]:
        """Returns the n best results of each line.

        Raises HTTPRequestEntityTooLarge if a line or all lines have too many tokens,
        asyncio.QueueFull if the queue lacks room for them, and NoResultError for a line without a
        result. Counting tokens and splitting lines take time, and happen only if there may be room.
        """
        # A first estimate, which costs nothing.
        num_chars = sum(len(line) for line in lines)
        self._batcher.check_room(client, num_chars // _CHARS_PER_TOKEN)

        # A thread tokenizes, so that other requests are answered meanwhile.
        tokens = await asyncio.to_thread(text_decoder.num_tokens, lines)
        self._check_size(tokens)
        self._batcher.check_room(client, sum(tokens))

        parts_by_line = await asyncio.to_thread(_parts, text_decoder, lines, seed)
        all_parts = list(itertools.chain.from_iterable(parts_by_line))
        results = await self._batcher.submit(client, text_decoder, all_parts)
        return list(text_decoder.joined(parts_by_line, results))

    def _client(self, request: web.Request) -> str:
        """Returns the last entry of the header, which the proxy added, or the address."""
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
        # The route's own path, since clients could invent any number of others, each a new metric.
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "unknown"
        self._metrics.count_request(path, response.status)
        return response


async def _file(path: pathlib.Path) -> web.StreamResponse:
    return web.FileResponse(path)


def _languages(spec: DecoderSpec) -> dict[str, Any]:
    return {
        "languages": spec.source_languages,
        "targets": spec.targets,
        "named_sources": bool(spec.sources),
    }


def _health(spec: DecoderSpec) -> dict[str, Any]:
    return {"model": spec.model, "num_best": spec.num_best, "kind": spec.kind}


def _completed(asked: completions.Asked, fields: dict[str, Any]) -> web.StreamResponse:
    if asked.is_streamed:
        events = completions.as_events(fields)
        return web.Response(text=events, content_type="text/event-stream")
    return web.json_response(fields)


def _parts(text_decoder: TextDecoder, lines: list[str], seed: int) -> list[list[Part]]:
    """Returns the parts of each line. Raises HTTPRequestEntityTooLarge if a line is too long."""
    parts_by_line = []
    for number, line in enumerate(lines, start=1):
        try:
            parts_by_line.append(text_decoder.parts(line, number, seed))
        except ValueError as error:
            raise web.HTTPRequestEntityTooLarge(0, text=str(error)) from error
    return parts_by_line


def _as_json(results: list[NBest], asked: Asked) -> list[list[dict[str, Any]]]:
    """Returns the requested results of each line as JSON-able values."""
    lines = []
    for best in results:
        fields = [dataclasses.asdict(hypothesis) for hypothesis in best[: asked.nbest]]
        if not asked.has_tokens:
            for of_hypothesis in fields:
                del of_hypothesis["tokens"]
        lines.append(fields)
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
    load: Callable[[], TextDecoder] | None = None,
    client_header: str | None = None,
) -> None:
    """Serves until interrupted; the options are as for Server.

    Port 0 takes a free port. Raises ValueError if the port is not available.
    """
    # The socket is made here, so that an occupied port is reported before anything starts.
    listener = connection.listen(host, port)
    name = f"[{host}]" if ":" in host else host
    port = listener.getsockname()[1]
    print(f"Serving {text_decoder.spec.model} on http://{name}:{port}", flush=True)

    logging.getLogger("aiohttp.access").setLevel(logging.INFO)
    server = Server(text_decoder, load=load, client_header=client_header)
    connection.run(server.app(), listener)
