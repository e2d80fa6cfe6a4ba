"""The requests that the server reads, and the errors and ids in its answers."""

import asyncio
import codecs
import dataclasses
import logging
import re
import secrets
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.files import text_file
from lingvo_gshard.input.example_codec import listed
from lingvo_gshard.input.manifest import Kind
from xla_spmd.files import json_records

REQUEST_ID = "X-Request-Id"
OPENAI = "/v1/"  # The addresses of completions.py.
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LANGUAGES = ("source_lang", "target_lang")  # These can also be parameters of a query.
_KEPT_HEADERS = ("Retry-After", "Allow")
_SLOW_CHARSETS = ("idna", "punycode")  # Decoding them takes time quadratic in the length.
_BODY_SECS = 60.0  # More than a megabyte takes over a slow connection.
_MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Route:
    """The path and fields of requests to a model of one kind."""

    path: str
    kind: Kind
    lines: str  # The field of a request with the lines.
    results: str  # The field of an answer with the results.
    options: tuple[str, ...]  # The other fields of a request, besides nbest.


ROUTES = (
    Route("/translate", Kind.PARALLEL, "lines", "translations", LANGUAGES),
    Route("/generate", Kind.TEXT, "prompts", "continuations", ("seed",)),
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The contents of a request."""

    lines: list[str]
    nbest: int = 1
    seed: int = dataclasses.field(default_factory=lambda: secrets.randbelow(_MAX_SEED))
    # The languages that the body names, by the names in LANGUAGES.
    languages: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_tokens: bool = False  # Whether the answer has the tokens' scores.


@web.middleware
async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers errors as JSON with their status, and gives every answer the request's id."""
    request_id = request.headers.get(REQUEST_ID, "")
    # The id is absent, or unfit for a header or a log.
    if not re.fullmatch(r"[\w.-]{1,64}", request_id, re.ASCII):
        request_id = uuid.uuid4().hex

    try:
        response = await handler(request)
    except web.HTTPException as error:
        headers = {name: error.headers[name] for name in _KEPT_HEADERS if name in error.headers}
        body = _error_body(request, error.text, error.status)
        response = web.json_response(body, status=error.status, headers=headers)
    except Exception:
        logging.exception("serving: %s %s, request %s", request.method, request.path, request_id)
        response = web.json_response(_error_body(request, "Decoding failed.", 500), status=500)

    response.headers[REQUEST_ID] = request_id
    return response


def _error_body(request: web.Request, text: str | None, status: int) -> dict[str, Any]:
    """Returns the body of an error, in the form that the programs of an address expect."""
    if not request.path.startswith(OPENAI):
        return {"error": text}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def one_line(problem: object) -> str:
    """Returns an error's message, or its repr if the message is empty, on one line."""
    return " ".join(str(problem).split()) or repr(problem)


async def fields(request: web.Request) -> Any:
    """Returns the fields of a body of JSON or of a form. Raises HTTPException like json_body."""
    if request.content_type == "application/x-www-form-urlencoded":
        text = await text_body(request, "strict")
        return dict(urllib.parse.parse_qsl(text, keep_blank_values=True))
    return await json_body(request, "application/json or a form")


async def json_body(request: web.Request, expected: str = "application/json or text/plain") -> Any:
    """Returns the body's JSON; `expected` names the types that the address takes.

    Raises HTTPException if the body is slow, damaged, of another content type, in an unknown
    charset, or not JSON.
    """
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text=f"Expected {expected}.")

    text = await text_body(request, "strict")
    try:
        return json_records.parse(text)
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"The body is not JSON: {error}.") from error


async def text_body(request: web.Request, errors: str) -> str:
    """Returns the body's text, decoded from its charset; `errors` is as for bytes.decode.

    Raises HTTPException if the body is slow, damaged, or in an unknown charset.
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
    """Raises HTTPBadRequest if the programs would refuse the body as a file, too."""
    try:
        text_file.check_head(body[: text_file.HEAD_BYTES], "the body")
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"{error}.") from error


def check_kind(kind: Kind, path: str, spec: DecoderSpec) -> None:
    """Raises HTTPNotFound, which names the right route, if a path is for another kind of model."""
    if kind != spec.kind:
        paths = {route.kind: route.path for route in ROUTES}
        own_path = paths[Kind(spec.kind)]
        raise web.HTTPNotFound(
            text=f"{path}: {spec.model} {spec.reading.does}; POST to {own_path}, not {path}."
        )


def asked(body: Any, spec: DecoderSpec, route: Route) -> Asked:
    """Returns the contents of a JSON request. Raises HTTPBadRequest if they are invalid."""
    lines = _lines(body, route.lines)

    known = (route.lines, "nbest", *route.options, "token_scores")
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise refused(f"Unknown field {', '.join(unknown)}, expected {', '.join(known)}.")

    has_tokens = body.get("token_scores", False)
    if not isinstance(has_tokens, bool):
        raise refused(f"token_scores: expected true or false, got {has_tokens!r}.")

    languages = {name: body[name] for name in LANGUAGES if body.get(name) is not None}
    num_best = nbest(body.get("nbest", 1), spec)
    return Asked(lines, num_best, seed(body.get("seed")), languages, has_tokens)


def seed(given: Any) -> int:
    """Returns the seed of a request; a new one for None. Raises HTTPBadRequest for any other."""
    if given is None:
        return secrets.randbelow(_MAX_SEED)
    if type(given) is not int or not 0 <= given <= _MAX_SEED:
        raise refused(f"seed: expected 0 to {_MAX_SEED}, got {given!r}.")
    return given


def beginning(query: Mapping[str, str], in_body: Mapping[str, Any], spec: DecoderSpec) -> str:
    """Returns the text that must start the lines for the languages in the query or the body.

    Raises HTTPBadRequest if the model does not have a language, or if a language is missing.
    """
    named: dict[str, Any] = {name: query[name] for name in LANGUAGES if name in query}
    for name, code in in_body.items():
        if named.setdefault(name, code) != code:
            raise refused(f"{name}: {named[name]!r} in the query, but {code!r} in the body.")

    source = named.get("source_lang")
    target = named.get("target_lang")
    codes = spec.source_languages
    if source is not None and source not in codes:
        raise refused(f"source_lang: expected one of {listed(codes)}, got {source!r}.")
    if target is not None and not isinstance(target, str):
        raise refused(f"target_lang: expected the code of a language, got {target!r}.")
    try:
        return spec.beginning(target, source)
    except ValueError as error:
        raise refused(str(error)) from error


def _lines(body: Any, field: str) -> list[str]:
    lines = body.get(field) if isinstance(body, dict) else None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise refused(f'Expected {{"{field}": [...]}}, a list of strings.')

    check_is_text(field, lines)
    return lines


def check_is_text(field: str, lines: list[str]) -> None:
    """Raises HTTPBadRequest for half of a surrogate pair, which JSON can spell."""
    try:
        "".join(lines).encode()
    except UnicodeEncodeError as error:
        raise refused(f"{field}: a surrogate without its other half is not text.") from error


def nbest(given: Any, spec: DecoderSpec, name: str = "nbest") -> int:
    """Returns the number of results of each line; `name` is the field's in an HTTPBadRequest."""
    # True and False are integers, too, but are mistakes here.
    if type(given) is int and 1 <= given <= spec.num_best:
        return given

    if spec.num_best == 1:
        raise refused(
            f"{name}: this server returns one {spec.reading.noun} for each line, not {given!r}."
        )
    raise refused(f"{name}: expected 1 to {spec.num_best}, got {given!r}.")


def refused(problem: str) -> web.HTTPBadRequest:
    """Returns the error for an invalid request."""
    return web.HTTPBadRequest(text=problem)
