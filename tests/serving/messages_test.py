"""Reading requests, their refusal with a reason, and the ids of answers."""

import asyncio
import dataclasses
import re

import pytest

from lingvo_gshard.serving import messages
from tests.serving.shouter import SPEC, Shouter, post, with_client


def test_plain_text_gets_one_line_per_line():
    async def act(client):
        body = "ab\n\nc\u2028d\xff\n".encode("latin-1", "replace") + b"e"
        headers = {"Content-Type": "text/plain"}
        async with client.post("/translate", data=body, headers=headers) as answer:
            assert answer.status == 200
            return await answer.text()

    assert with_client(act) == "AB\n\nC?D\ufffd\nE\n"


_ERRORS = [
    (b"[" * 100_000, {"Content-Type": "application/json"}, 400, "not JSON"),
    (b"junk", {"Content-Type": "text/plain", "Content-Encoding": "gzip"}, 400, "gzip"),
    (b"a", {"Content-Type": "text/plain; charset=klingon"}, 415, "unknown encoding: klingon"),
    (b"a-", {"Content-Type": "text/plain; charset=Punycode"}, 415, "unknown encoding: punycode"),
    (b"\xff", {"Content-Type": "application/json; charset=ascii"}, 400, "cannot be read: 'ascii'"),
    (b"a", {"Content-Type": "text/plain; charset=undefined"}, 400, "undefined encoding"),
    (b"\\ud800", {"Content-Type": "text/plain; charset=unicode_escape"}, 400, "surrogates not"),
]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], '"lines": .* a list of strings'),
        ({}, '"lines": .* a list of strings'),
        ({"lines": "ab"}, '"lines": .* a list of strings'),
        ({"lines": ["ab", 3]}, '"lines": .* a list of strings'),
        ({"lines": ["ab", "c\ud83d"]}, "lines: a surrogate without its other half"),
        ({"lines": ["ab"], "nbest": 3}, "nbest: expected 1 to 2, got 3"),
        ({"lines": ["ab"], "nbest": True}, "nbest: expected 1 to 2, got True"),
        ({"lines": ["ab"], "source_lang": "xx"}, "source_lang: expected one of de, fr, got 'xx'"),
        (
            {"lines": ["ab"], "n_best": 1},
            "Unknown field n_best, expected lines, nbest, source_lang",
        ),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(body, message):
    async def act(client):
        return await post(client, body, status=400)

    assert re.search(message, with_client(act)["error"])


def test_a_server_of_one_translation_says_so():
    async def act(client):
        return await post(client, {"lines": ["ab"], "nbest": 7}, status=400)

    translator = Shouter(spec=dataclasses.replace(SPEC, num_best=1))
    expected = "nbest: this server returns one translation a line, not 7."
    assert with_client(act, translator) == {"error": expected}


@pytest.mark.parametrize(("data", "headers", "status", "message"), _ERRORS)
def test_bodies_that_cannot_be_read_are_wrong_requests(data, headers, status, message):
    async def act(client):
        async with client.post("/translate", data=data, headers=headers) as answer:
            assert answer.status == status
            return (await answer.json())["error"]

    assert message in with_client(act)


def test_text_is_read_in_its_charset():
    async def act(client):
        headers = {"Content-Type": "text/plain; charset=latin-1"}
        data = "\u00e4\u00f6".encode("latin-1")
        async with client.post("/translate", data=data, headers=headers) as answer:
            return await answer.text()

    assert with_client(act) == "\u00c4\u00d6\n"


def test_a_body_must_arrive_in_time(monkeypatch):
    monkeypatch.setattr(messages, "_BODY_SECS", 0.2)

    async def act(client):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        head = b"POST /translate HTTP/1.1\r\nHost: here\r\nContent-Type: text/plain\r\n"
        writer.write(head + b"Content-Length: 9\r\n\r\nhal")
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 5)
        writer.close()
        return answer

    answer = with_client(act)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"The body took over 0.2 s." in answer


def test_an_answer_has_the_id_of_its_request(caplog):
    async def act(client):
        found = []
        for given in ("job-7", "no id\u00e9!", None):
            headers = {"X-Request-Id": given} if given else {}
            async with client.get("/nothing", headers=headers) as answer:
                found.append(answer.headers["X-Request-Id"])
        headers = {"X-Request-Id": "job-8"}
        async with client.post("/translate", json={"lines": ["raise"]}, headers=headers) as answer:
            assert answer.status == 500
        return found

    first, second, third = with_client(act)
    assert first == "job-7" and re.fullmatch("[0-9a-f]{32}", second) and second != third
    assert "serving: POST /translate, request job-8" in caplog.text


def test_errors_have_their_status_and_a_json_body():
    async def act(client):
        statuses = []
        for data, kind in (
            (b"{", "application/json"),
            (b"\xff\xfe", "application/json"),
            (b"<a/>", "application/xml"),
            (b"a" * (1 << 21), "text/plain"),
        ):
            headers = {"Content-Type": kind}
            async with client.post("/translate", data=data, headers=headers) as answer:
                statuses.append((answer.status, bool((await answer.json())["error"])))
        for path in ("/nothing", "/translate"):
            async with client.get(path) as answer:
                statuses.append((answer.status, bool((await answer.json())["error"])))
        return statuses

    assert with_client(act) == [(s, True) for s in (400, 400, 415, 413, 404, 405)]
