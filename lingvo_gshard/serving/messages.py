"""The requests that the server reads, and the errors and ids that it answers with."""

import asyncio
import codecs
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from lingvo_gshard.translation.bundle import DecoderSpec

REQUEST_ID = "X-Request-Id"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SLOW_CHARSETS = ("idna", "punycode")  # Their time grows with the square of the length.
_BODY_SECS = 60.0  # More than a megabyte needs on a slow line.


@web.middleware
async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers errors as JSON, with their status, and gives every answer the request's id."""
    given = request.headers.get(REQUEST_ID, "")
    name = given if re.fullmatch(r"[\w.-]{1,64}", given) else uuid.uuid4().hex
    try:
        response = await handler(request)
    except web.HTTPException as error:
        kept = {k: v for k, v in error.headers.items() if k in ("Retry-After", "Allow")}
        response = web.json_response({"error": error.text}, status=error.status, headers=kept)
    except Exception:
        logging.exception("serving: %s %s, request %s", request.method, request.path, name)
        response = web.json_response({"error": "The translation failed."}, status=500)
    response.headers[REQUEST_ID] = name
    return response


def _unparsed(
    handler: web.RequestHandler,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
) -> web.StreamResponse:
    """Answers what is no HTTP that aiohttp understands, which no middleware sees."""
    logging.warning("serving: no request from %s: %r", request.remote, exc)
    response = web.json_response({"error": one_line(message)}, status=status)
    response.force_close()
    return response


web.RequestHandler.handle_error = _unparsed  # type: ignore[method-assign, assignment]


def one_line(problem: object) -> str:
    """Returns what `problem` says, or is, in one line."""
    return " ".join(str(problem).split()) or repr(problem)


async def json_body(request: web.Request) -> Any:
    """Reads JSON; raises HTTPException as `text_body`, for another type, and for other text."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Expected application/json or text/plain.")
    try:
        return json.loads(await text_body(request, "strict"))
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(text=f"The body is not JSON: {error}.") from error


async def text_body(request: web.Request, errors: str) -> str:
    """Reads text in its charset; `errors` is that of bytes.decode.

    Raises HTTPException for a body that is slow or damaged, or in an unknown charset.
    """
    try:
        async with asyncio.timeout(_BODY_SECS):
            body = await request.read()
        charset = codecs.lookup(request.charset or "utf-8").name
        if charset in _SLOW_CHARSETS:
            raise LookupError(f"unknown encoding: {charset}")
        text = body.decode(charset, errors)
        text.encode()  # Some charsets can spell half of a character.
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"The body took over {_BODY_SECS:g} s.") from error
    except LookupError as error:
        raise web.HTTPUnsupportedMediaType(text=f"{error}.") from error
    except (web.RequestPayloadError, UnicodeError) as error:
        raise web.HTTPBadRequest(text=f"The body cannot be read: {error}.") from error
    return text


def asked(body: Any, spec: DecoderSpec) -> tuple[list[str], int]:
    """Returns the lines of a request in JSON and the number of translations for each.

    Raises HTTPBadRequest for anything else.
    """
    lines = body.get("lines") if isinstance(body, dict) else None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise web.HTTPBadRequest(text='Expected {"lines": [...]}, a list of strings.')
    try:
        "".join(lines).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character.
        problem = "lines: a surrogate without its other half is not text."
        raise web.HTTPBadRequest(text=problem) from error
    known = ["lines", "nbest", "source_lang"]
    if unknown := ", ".join(sorted(set(body) - set(known))):
        raise web.HTTPBadRequest(text=f"Unknown field {unknown}, expected {', '.join(known)}.")
    nbest, most = body.get("nbest", 1), spec.num_best
    if type(nbest) is not int or not 1 <= nbest <= most:
        problem = f"nbest: expected 1 to {most}, got {nbest!r}."
        if most == 1:
            problem = f"nbest: this server returns one translation a line, not {nbest!r}."
        raise web.HTTPBadRequest(text=problem)
    language, codes = body.get("source_lang"), spec.source_languages
    if language is not None and language not in codes:
        expected = f"expected one of {', '.join(codes)}"
        raise web.HTTPBadRequest(text=f"source_lang: {expected}, got {language!r}.")
    return lines, nbest
