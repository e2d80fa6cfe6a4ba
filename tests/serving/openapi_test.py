"""Every address of openapi.json, with bodies that match its schemas and with any others.

tests/serving/app_test.py checks that the server has exactly the addresses of openapi.json.
"""

import dataclasses
import json
import pathlib

import hypothesis
import pytest
from aiohttp import web
from hypothesis import strategies as st

from lingvo_gshard.serving import app, messages
from tests.serving.shouter import SPEC, Shouter, with_client

_DESCRIPTION = json.loads(
    (pathlib.Path(app.__file__).parent / "openapi.json").read_text(encoding="utf-8")
)
_PATHS = _DESCRIPTION["paths"]
_CODES = tuple(f"l{i:03d}_Latn" for i in range(200))
_MODELS = {
    "translates": SPEC,
    "translates 200 languages": dataclasses.replace(SPEC, sources=_CODES, targets=_CODES),
    "continues": dataclasses.replace(SPEC, kind="text", languages=("books",)),
}
_MAX_ANSWER_BYTES = 2**16

_WORDS = st.text(max_size=20)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=6,
)
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "lines": st.lists(_WORDS, max_size=3) | _VALUES,
        "prompts": st.lists(_WORDS, max_size=3) | _VALUES,
        "nbest": st.integers(1, 2) | _VALUES,
        "seed": st.integers(0, 2**31 - 1) | _VALUES,
        "source_lang": st.sampled_from(_CODES) | _VALUES,
        "target_lang": st.sampled_from(_CODES) | _VALUES,
        "token_scores": st.booleans() | _VALUES,
        "q": _WORDS | st.lists(_WORDS, max_size=3) | _VALUES,
        "source": st.sampled_from(_CODES) | _VALUES,
        "target": st.sampled_from(_CODES) | _VALUES,
        "format": st.just("text") | _VALUES,
        "alternatives": st.integers(0, 3) | _VALUES,
        "prompt": _WORDS | st.lists(_WORDS, max_size=3) | _VALUES,
        "messages": st.lists(st.fixed_dictionaries({"role": _WORDS, "content": _WORDS})) | _VALUES,
        "n": st.integers(1, 2) | _VALUES,
        "max_tokens": st.integers(1, 3) | _VALUES,
        "stop": _WORDS | _VALUES,
        "logprobs": st.just(0) | _VALUES,
        "stream": st.booleans() | _VALUES,
    },
)
_BODIES = st.one_of(
    _FIELDS.map(lambda fields: json.dumps(fields).encode()),
    _VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40),
)
_TYPES = st.sampled_from(
    [
        "application/json",
        "text/plain",
        "text/plain; charset=utf-16",
        "text/plain; charset=rot13",
        "application/json; charset=unicode_escape",
        "text/plain; charset=x",
        "image/png",
        "application/x-www-form-urlencoded",
        "",
    ]
)
_REQUESTS = st.tuples(
    st.sampled_from(sorted(_PATHS)),
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
    st.dictionaries(st.sampled_from(["source_lang", "target_lang", "x"]), _WORDS, max_size=2),
    _TYPES,
    _BODIES,
)


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(sorted(_MODELS)), st.lists(_REQUESTS, min_size=20, max_size=40))
def test_every_answer_agrees_with_the_description(model, requests):
    async def act(client):
        for path, method, query, content_type, body in requests:
            headers = {"Content-Type": content_type} if content_type else {}
            sent = client.request(method, path, params=query, data=body, headers=headers)
            async with sent as answer:
                found = await answer.read()
                where = f"{method} {path} {query} {content_type} {body!r}: {answer.status}"
                _check(path, method.lower(), answer, found, where)

    with_client(act, Shouter(spec=_MODELS[model]))


def _check(path, method, answer, content, where):
    assert answer.status != 500 and len(content) < _MAX_ANSWER_BYTES, where
    if method not in _PATHS[path]:
        assert answer.status == 405, where
        return
    described = _PATHS[path][method]["responses"]
    assert str(answer.status) in described, where
    if answer.status >= 400:
        error = json.loads(content)["error"]
        message = error["message"] if path.startswith(messages.OPENAI) else error
        assert isinstance(message, str), where


def test_null_is_accepted_where_the_description_allows_it():
    for route in messages.ROUTES:
        content = _DESCRIPTION["paths"][route.path]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        fields = _DESCRIPTION["components"]["schemas"][name]["properties"]
        for field, schema in fields.items():
            body = {route.lines: [], field: None}
            if "null" in schema["type"]:
                assert messages.asked(body, SPEC, route).lines == []
            else:
                with pytest.raises(web.HTTPBadRequest):
                    messages.asked(body, SPEC, route)
