"""Requests, their refusals with a reason, and the ids of answers."""

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
    (b"\x1f\x8b\x08junk", {"Content-Type": "text/plain"}, 400, "the body is gzip, expected text"),
    ("ab\n".encode("utf-16"), {"Content-Type": "text/plain"}, 400, "the body is UTF-16, expected"),
]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, '"lines": .* a list of strings'),
        ({"lines": ["ab", 3]}, '"lines": .* a list of strings'),
        ({"lines": ["ab", "c\ud83d"]}, "lines: a surrogate without its other half"),
        ({"lines": ["ab"], "nbest": 3}, "nbest: expected 1 to 2, got 3"),
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


_OF_PROMPTS = dataclasses.replace(SPEC, model="toy.Lm", kind="text")


class _Seeded(Shouter):
    """Prefixes a line with its number and seed; refuses lines that begin with `long`."""

    def parts(self, line, number=1, seed=0):
        if line.startswith("long"):
            raise ValueError(f"prompt {number} has 99 tokens")
        return super().parts(f"{number} {seed} {line}")


def test_prompts_have_a_separate_route_and_a_seed():
    async def act(client):
        answer = await post(client, {"prompts": ["a", "b"], "seed": 7}, path="/generate")
        by_default = []
        for _ in range(2):
            again = await post(client, {"prompts": ["a"]}, path="/generate")
            by_default.append(again["continuations"][0][0]["text"])
        async with client.post(
            "/generate", data=b"a\nb", headers={"Content-Type": "text/plain"}
        ) as plain:
            return answer, by_default, await plain.text()

    answer, (first, second), plain = with_client(act, _Seeded(spec=_OF_PROMPTS))
    assert [nbest[0]["text"] for nbest in answer["continuations"]] == ["1 7 A", "2 7 B"]
    assert first != second  # Each request has its own seed.
    assert re.fullmatch(r"1 (\d+) A\n2 \1 B\n", plain)


@pytest.mark.parametrize(
    ("path", "kind", "body", "status", "message"),
    [
        ("/translate", "text", {"lines": ["a"]}, 404, "toy.Lm continues prompts; POST to /gen"),
        ("/generate", "parallel", {"prompts": ["a"]}, 404, "translates lines; POST to /translate"),
        ("/generate", "text", {"lines": ["a"]}, 400, '"prompts": .* a list of strings'),
        ("/generate", "text", {"prompts": ["a"], "seed": -1}, 400, "seed: expected 0 to 214748"),
        (
            "/generate",
            "text",
            {"prompts": ["a"], "source_lang": "de"},
            400,
            "Unknown field source_lang, expected prompts, nbest, seed",
        ),
        ("/generate", "text", {"prompts": ["a", "long"]}, 413, "prompt 2 has 99 tokens"),
        ("/generate?target_lang=de", "text", {"prompts": ["a"]}, 400, "into no language"),
    ],
)
def test_requests_for_another_model_and_wrong_prompts_are_refused(
    path, kind, body, status, message
):
    async def act(client):
        return await post(client, body, status=status, path=path)

    spec = dataclasses.replace(_OF_PROMPTS, kind=kind)
    error = with_client(act, _Seeded(spec=spec))["error"]
    assert re.search(message, error) and "\n" not in error


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
        for given in ("job-7", "job-\u00e9", None):
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
