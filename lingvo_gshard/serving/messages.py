"""The requests that the server reads, and the errors and ids that it answers with."""

import asyncio
import codecs
import dataclasses
import logging
import re
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from lingvo_gshard.decoding.bundle import DecoderSpec
from lingvo_gshard.files import json_records, text_file
from lingvo_gshard.input.example_codec import listed
from lingvo_gshard.input.manifest import Kind

REQUEST_ID = "X-Request-Id"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LANGUAGES = ("source_lang", "target_lang")  # Also parameters of a query.
_KEPT_HEADERS = ("Retry-After", "Allow")
_SLOW_CHARSETS = ("idna", "punycode")  # Their time grows with the square of the length.
_BODY_SECS = 60.0  # More than a megabyte needs on a slow line.
_MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Route:
    """The words of the requests that a model of one kind answers."""

    path: str
    kind: Kind
    lines: str  # The field of a request that has the lines.
    results: str  # That of an answer.
    options: tuple[str, ...]  # Other fields of a request, besides nbest.


ROUTES = (
    Route("/translate", Kind.PARALLEL, "lines", "translations", LANGUAGES),
    Route("/generate", Kind.TEXT, "prompts", "continuations", ("seed",)),
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    lines: list[str]
    nbest: int = 1
    seed: int = dataclasses.field(default_factory=lambda: secrets.randbelow(_MAX_SEED))
    # Which of LANGUAGES the body names.
    languages: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@web.middleware
async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers errors as JSON, with their status, and gives every answer the request's id."""
    request_id = request.headers.get(REQUEST_ID, "")
    if not re.fullmatch(r"[\w.-]{1,64}", request_id):  # Absent, or unfit for a header or a log.
        request_id = uuid.uuid4().hex

    try:
        response = await handler(request)
    except web.HTTPException as error:
        headers = {name: error.headers[name] for name in _KEPT_HEADERS if name in error.headers}
        response = web.json_response({"error": error.text}, status=error.status, headers=headers)
    except Exception:
        logging.exception("serving: %s %s, request %s", request.method, request.path, request_id)
        response = web.json_response({"error": "Decoding failed."}, status=500)

    response.headers[REQUEST_ID] = request_id
    return response


def one_line(problem: object) -> str:
    """Returns an error's message, or its repr if it has none, in one line."""
    return " ".join(str(problem).split()) or repr(problem)


async def json_body(request: web.Request) -> Any:
    """Returns the body's JSON.

    Raises HTTPException as `text_body`, for another content type, and for text that is not JSON.
    """
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Expected application/json or text/plain.")

    text = await text_body(request, "strict")
    try:
        return json_records.parse(text)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"The body is not JSON: {error}.") from error


async def text_body(request: web.Request, errors: str) -> str:
    """Returns the body's text, decoded from its charset; `errors` is as in bytes.decode.

    Raises HTTPException for a body that is slow or damaged, or in an unknown charset.
    """
    try:
        async with asyncio.timeout(_BODY_SECS):
            body = await request.read()

        charset = codecs.lookup(request.charset or "utf-8").name
        if charset in _SLOW_CHARSETS:
            raise LookupError(f"unknown encoding: {charset}")
        if text_file.is_same_as_utf8(charset):
            _check_is_text(body)
        text = body.decode(charset, errors)

        # Some charsets can spell half of a surrogate pair, which is not text.
        text.encode()
        return text
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"The body took over {_BODY_SECS:g} s.") from error
    except LookupError as error:
        raise web.HTTPUnsupportedMediaType(text=f"{error}.") from error
    except (web.RequestPayloadError, UnicodeError) as error:
        raise web.HTTPBadRequest(text=f"The body cannot be read: {error}.") from error


def _check_is_text(body: bytes) -> None:
    """Raises HTTPBadRequest for a body that the programs refuse as a file, too."""
    try:
        text_file.check_head(body[: text_file.HEAD_BYTES], "the body")
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"{error}.") from error


def check_route(route: Route, spec: DecoderSpec) -> None:
    """Raises HTTPNotFound, which names the route of the model, for that of another kind."""
    if route.kind != spec.kind:
        paths = {other.kind: other.path for other in ROUTES}
        own_path = paths[Kind(spec.kind)]
        raise web.HTTPNotFound(
            text=f"{route.path}: {spec.model} {spec.does}; POST to {own_path}, not {route.path}."
        )


def asked(body: Any, spec: DecoderSpec, route: Route) -> Asked:
    """Returns what a request in JSON asks for. Raises HTTPBadRequest for anything else."""
    lines = _lines(body, route.lines)

    fields = (route.lines, "nbest", *route.options)
    unknown = sorted(set(body) - set(fields))
    if unknown:
        raise _refused(f"Unknown field {', '.join(unknown)}, expected {', '.join(fields)}.")

    nbest = _nbest(body.get("nbest", 1), spec.num_best, spec.noun)

    languages = {name: body[name] for name in LANGUAGES if body.get(name) is not None}

    seed = body.get("seed")
    if seed is None:
        return Asked(lines, nbest, languages=languages)
    if type(seed) is not int or not 0 <= seed <= _MAX_SEED:
        raise _refused(f"seed: expected 0 to {_MAX_SEED}, got {seed!r}.")
    return Asked(lines, nbest, seed, languages)


def beginning(query: Mapping[str, str], asked: Asked, spec: DecoderSpec) -> str:
    """Returns what the lines must begin with for their languages, named in the query or the body.

    Raises HTTPBadRequest for a language that the model does not have, or one that is missing.
    """
    named: dict[str, Any] = {name: query[name] for name in LANGUAGES if name in query}
    for name, code in asked.languages.items():
        if named.setdefault(name, code) != code:
            raise _refused(f"{name}: {named[name]!r} in the query, but {code!r} in the body.")

    source = named.get("source_lang")
    target = named.get("target_lang")
    codes = spec.source_languages
    if source is not None and source not in codes:
        raise _refused(f"source_lang: expected one of {listed(codes)}, got {source!r}.")
    if target is not None and not isinstance(target, str):
        raise _refused(f"target_lang: expected the code of a language, got {target!r}.")
    try:
        return spec.beginning(target, source)
    except ValueError as error:
        raise _refused(str(error)) from error


def _lines(body: Any, field: str) -> list[str]:
    lines = body.get(field) if isinstance(body, dict) else None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise _refused(f'Expected {{"{field}": [...]}}, a list of strings.')

    try:
        "".join(lines).encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair.
        raise _refused(f"{field}: a surrogate without its other half is not text.") from error
    return lines


def _nbest(nbest: Any, num_best: int, noun: str) -> int:
    # True and False are integers, too, but a mistake here.
    if type(nbest) is int and 1 <= nbest <= num_best:
        return nbest

    if num_best == 1:
        raise _refused(f"nbest: this server returns one {noun} a line, not {nbest!r}.")
    raise _refused(f"nbest: expected 1 to {num_best}, got {nbest!r}.")


def _refused(problem: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=problem)
