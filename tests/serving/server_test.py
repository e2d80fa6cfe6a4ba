"""The server: responses, errors, batches of several requests, and a full queue."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import threading
import time

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from lingvo_gshard.serving import app, messages
from lingvo_gshard.serving.app import Server
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull
from lingvo_gshard.translation.bundle import DecoderSpec
from lingvo_gshard.translation.translator import Attention, Part, Translation

_SPEC = DecoderSpec("toy", ("de", "fr"), 4, (16,), 2, 1)


def _part(line, row_length=16):
    """A token a letter, and one for the end."""
    return Part(np.array([*map(ord, line), 0]), row_length)


def _text(part):
    return "".join(map(chr, part.ids[:-1]))


class _Shouter:
    """Translates lines to upper case, with `?` as the second best; records batch sizes."""

    num_rows = 4

    def __init__(self, secs=0.0, spec=_SPEC):
        self.secs, self.batches, self.spec = secs, [], spec
        self._busy = threading.Lock()

    def num_tokens(self, lines):
        return [len(line) + 1 for line in lines]

    @property
    def decoder(self):
        return self

    def compile(self):
        time.sleep(self.secs)

    def parts(self, line):
        return [_part(line)]

    def translate_parts(self, parts):
        return list(self._translate(parts))

    def _translate(self, parts):
        assert self._busy.acquire(blocking=False), "two batches at once"
        lines = list(map(_text, parts))
        assert len(lines) <= self.num_rows
        if "raise" in lines:
            self._busy.release()
            raise RuntimeError("the device is gone")
        self.batches.append(len(lines))
        time.sleep(self.secs)
        self._busy.release()
        drawn = Attention(("a",), ("A",), ((1.0,),))
        for line in lines:
            yield (Translation(line.upper(), -0.5, 2, drawn), Translation("?", -2.0, 1))


def _with_client(act, translator=None, limits=None, **options):
    """Runs `act(client)` against a server on a port of this machine."""

    async def run():
        server = Server(translator or _Shouter(), limits, **options)
        async with TestClient(TestServer(server.app())) as client:
            return await act(client)

    return asyncio.run(run())


async def _post(client, body, status=200):
    async with client.post("/translate", json=body) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


def test_json_lines_get_translations():
    async def act(client):
        return await _post(client, {"lines": ["guten tag", ""], "nbest": 2, "source_lang": "de"})

    attention = {"source_pieces": ["a"], "target_pieces": ["A"], "weights": [[1.0]]}
    want = {"text": "GUTEN TAG", "score": -0.5, "num_tokens": 2, "attention": attention}
    (first, second), other = _with_client(act)["translations"]
    assert first == want and second["text"] == "?" and other[0]["text"] == ""


def test_plain_text_gets_one_line_per_line():
    async def act(client):
        body = "ab\n\nc\u2028d\xff\n".encode("latin-1", "replace") + b"e"
        headers = {"Content-Type": "text/plain"}
        async with client.post("/translate", data=body, headers=headers) as answer:
            assert answer.status == 200
            return await answer.text()

    assert _with_client(act) == "AB\n\nC?D\ufffd\nE\n"


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
        return await _post(client, body, status=400)

    assert re.search(message, _with_client(act)["error"])


def test_a_server_of_one_translation_says_so():
    async def act(client):
        return await _post(client, {"lines": ["ab"], "nbest": 7}, status=400)

    translator = _Shouter(spec=dataclasses.replace(_SPEC, num_best=1))
    expected = "nbest: this server returns one translation a line, not 7."
    assert _with_client(act, translator) == {"error": expected}


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

    assert _with_client(act) == [(s, True) for s in (400, 400, 415, 413, 404, 405)]


def test_a_line_or_request_of_too_many_tokens_is_too_large():
    async def act(client):
        await _post(client, {"lines": ["a"] * 5})
        found = [await _post(client, {"lines": ["a"] * 6}, status=413)]
        return [*found, await _post(client, {"lines": ["abcdefg"]}, status=413)]

    request, line = _with_client(act, limits=Limits(line_tokens=7, request_tokens=10))
    assert request == {"error": "A request can have at most 10 tokens, got 12; split it."}
    assert line == {"error": "A line can have at most 7 tokens, got 8; split it."}


def test_after_a_failure_the_next_request_succeeds():
    async def act(client):
        failed = await _post(client, {"lines": ["raise"]}, status=500)
        fine = await _post(client, {"lines": ["ab"]})
        return failed["error"], fine["translations"][0][0]["text"]

    assert _with_client(act) == ("The translation failed.", "AB")


def test_a_model_of_several_targets_needs_to_know_which():
    spec = dataclasses.replace(_SPEC, languages=("de", "en-de", "en-ben"), targets=("de", "en"))

    async def act(client):
        body = {"json": {"lines": ["tag"], "source_lang": "en"}}
        found = []
        for path, given in {"?target_lang=de": body, "?target_lang=en": {"data": "x"}}.items():
            async with client.post(f"/translate{path}", **given) as answer:
                found.append(await answer.text())
        for path in ("", "?target_lang=fr"):
            async with client.post(f"/translate{path}", **body) as answer:
                assert answer.status == 400
                found.append((await answer.json())["error"])
        async with client.get("/languages") as answer:
            return found, await answer.json()

    (german, english, *errors), languages = _with_client(act, _Shouter(spec=spec))
    assert '"<2DE> TAG"' in german and english == "<2EN> X\n"
    assert errors == [
        f"target_lang {code}: expected one of de, en" for code in ("is missing", "fr")
    ]
    assert languages == {"languages": ["de", "en"], "targets": ["de", "en"]}


def test_health_languages_and_metrics():
    async def act(client):
        await _post(client, {"lines": ["ab", "cd"]})
        await _post(client, {}, status=400)
        found = []
        for path in ("/healthz", "/languages", "/metrics"):
            async with client.get(path) as answer:
                assert answer.status == 200
                found.append(await answer.text())
        return found

    health, languages, metrics = _with_client(act)
    assert '"model": "toy"' in health and '["de", "fr"]' in languages
    for line in (
        "lines_total 2.0",
        "tokens_total 6.0",
        'requests_total{path="/translate",status="200"} 1.0',
        'requests_total{path="/translate",status="400"} 1.0',
        "queued_tokens 0.0",
        "translate_seconds_count 1.0",
        'batch_rows_bucket{le="1.0"} 0.0',
        'batch_rows_bucket{le="2.0"} 1.0',
    ):
        assert line in metrics.splitlines()
    assert "process_resident_memory_bytes " in metrics


def test_nothing_is_lost_at_saturation():
    """Sends 300 requests at once to a queue of 240 tokens: each gets its own answer in the end."""
    translator, refused = _Shouter(secs=0.002), []

    async def one(client, i):
        lines = [f"r{i} l{j}" for j in range(1 + i % 3)]
        while True:
            async with client.post("/translate", json={"lines": lines}) as answer:
                body = await answer.json()
                if answer.status == 200:
                    got = [found[0]["text"] for found in body["translations"]]
                    assert got == [line.upper() for line in lines]
                    return len(lines)
                assert answer.status in (429, 503) and answer.headers["Retry-After"] == "1"
                refused.append(i)
            await asyncio.sleep(0.01)

    async def act(client):
        return sum(await asyncio.gather(*(one(client, i) for i in range(300))))

    sent = _with_client(act, translator, Limits(queued_tokens=240))
    assert sent == sum(translator.batches) == 600
    assert refused and len(translator.batches) < 200  # Requests shared batches.


_ERRORS = [
    (b"[" * 100_000, {"Content-Type": "application/json"}, 400, "not JSON"),
    (b"junk", {"Content-Type": "text/plain", "Content-Encoding": "gzip"}, 400, "gzip"),
    (b"a", {"Content-Type": "text/plain; charset=klingon"}, 415, "unknown encoding: klingon"),
    (b"a-", {"Content-Type": "text/plain; charset=Punycode"}, 415, "unknown encoding: punycode"),
    (b"\xff", {"Content-Type": "application/json; charset=ascii"}, 400, "cannot be read: 'ascii'"),
    (b"a", {"Content-Type": "text/plain; charset=undefined"}, 400, "undefined encoding"),
    (b"\\ud800", {"Content-Type": "text/plain; charset=unicode_escape"}, 400, "surrogates not"),
]


@pytest.mark.parametrize(("data", "headers", "status", "message"), _ERRORS)
def test_bodies_that_cannot_be_read_are_wrong_requests(data, headers, status, message):
    async def act(client):
        async with client.post("/translate", data=data, headers=headers) as answer:
            assert answer.status == status
            return (await answer.json())["error"]

    assert message in _with_client(act)


def test_text_is_read_in_its_charset():
    async def act(client):
        headers = {"Content-Type": "text/plain; charset=latin-1"}
        data = "\u00e4\u00f6".encode("latin-1")
        async with client.post("/translate", data=data, headers=headers) as answer:
            return await answer.text()

    assert _with_client(act) == "\u00c4\u00d6\n"


@pytest.mark.parametrize(
    "request_line",
    [
        b"FROB!NICATE / HTTP/1.1\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n",
        b"POST /translate HTTP/1.1\r\nContent-Length: many\r\n",
    ],
)
def test_what_is_no_http_is_answered_as_json(request_line):
    async def act(client):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(request_line + b"Host: here\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return answer

    head, _, body = _with_client(act).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") or head.startswith(b"HTTP/1.0 400 "), head
    assert json.loads(body)["error"] and b"application/json" in head


def test_a_body_must_arrive_in_time(monkeypatch):
    monkeypatch.setattr(messages, "_BODY_SECS", 0.2)

    async def act(client):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        head = b"POST /translate HTTP/1.1\r\nHost: here\r\nContent-Type: text/plain\r\n"
        writer.write(head + b"Content-Length: 9\r\n\r\nhal")
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 5)
        writer.close()
        return answer

    answer = _with_client(act)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"The body took over 0.2 s." in answer


def _settings(monkeypatch):
    """Returns what `serve` gives to aiohttp."""
    settings = {}
    monkeypatch.setattr(app.web, "run_app", lambda *_, **given: settings.update(given))
    app.serve(_Shouter(), "127.0.0.1", 0)
    return settings


@pytest.mark.parametrize("sent", [b"", b"POST /translate HTTP/1.1\r\nHost: he"])
def test_a_connection_without_a_request_is_closed(sent, monkeypatch):
    monkeypatch.setattr(app, "_IDLE_SECS", 0.2)

    async def run():
        server = TestServer(Server(_Shouter()).app())
        given = _settings(monkeypatch)["keepalive_timeout"]
        await server.start_server(keepalive_timeout=given)
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await server.close()

    asyncio.run(run())


def test_who_hangs_up_is_not_translated_for(monkeypatch):
    translator = _Shouter(secs=0.05)

    async def act(client):
        waiting = asyncio.create_task(_post(client, {"lines": ["a"] * 50}))
        while not translator.batches:
            await asyncio.sleep(0.01)
        waiting.cancel()
        return await _post(client, {"lines": ["b"]})

    assert _settings(monkeypatch)["handler_cancellation"]  # As a TestServer's is.
    _with_client(act, translator)
    assert len(translator.batches) < 5 and translator.batches[-1] == 1


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

    first, second, third = _with_client(act)
    assert first == "job-7" and re.fullmatch("[0-9a-f]{32}", second) and second != third
    assert "serving: POST /translate, request job-8" in caplog.text


def test_the_server_is_ready_after_a_first_batch_and_while_its_queue_has_room():
    async def act(client):
        found = []
        for _ in range(60):
            async with client.get("/readyz") as answer:
                found.append(answer.status)
            await asyncio.sleep(0.01)
        first = asyncio.create_task(_post(client, {"lines": ["ab", "cd"]}))
        await asyncio.sleep(0.1)  # Its first line is being translated.
        second = asyncio.create_task(_post(client, {"lines": ["ab", "cd"]}))
        await asyncio.sleep(0.05)
        async with client.get("/readyz") as answer:
            assert answer.status == 503
            error = (await answer.json())["error"]
        await asyncio.gather(first, second)
        return found, error

    limits = Limits(client_tokens=99, queued_tokens=9)
    translator = _Shouter(secs=0.2)
    translator.num_rows = 1
    found, error = _with_client(act, translator, limits)
    assert found[0] == 503 and found[-1] == 200 and found == sorted(found, reverse=True)
    assert error == "The queue is full."


def test_the_description_names_every_path():
    async def act(client):
        routes = {route.resource.canonical for route in client.app.router.routes()}
        async with client.get("/openapi.json") as answer:
            return routes, await answer.json()

    routes, description = _with_client(act)
    assert set(description["paths"]) == routes and description["openapi"].startswith("3.")


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--serve={port} on 127.0.0.1: Address already in"):
            app.serve(_Shouter(), "127.0.0.1", port)
    assert not capsys.readouterr().out


def test_the_port_that_was_found_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(app.web, "run_app", lambda _, sock, **settings: sock.close())
    app.serve(_Shouter(), "127.0.0.1", 0)
    assert re.fullmatch(r"Serving toy on http://127.0.0.1:[1-9]\d*\n", capsys.readouterr().out)


# --- the batcher ---


@contextlib.asynccontextmanager
async def _batcher(translator, **limits):
    """Yields a function that submits lines of a client."""
    async with Batcher(Limits(**limits)) as batcher:

        def submit(lines, client="one", row_length=16):
            return batcher.submit(client, translator, [_part(line, row_length) for line in lines])

        yield submit


class _Recorder(_Shouter):
    """Also records the lines of each batch."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def translate_parts(self, parts):
        self.lines.append(" ".join(map(_text, parts)))
        return super().translate_parts(parts)


def test_a_large_request_is_translated_in_several_batches_in_order():
    translator = _Shouter()

    async def run():
        async with _batcher(translator) as submit:
            lines = [[f"{n} {i}" for i in range(n)] for n in (3, 9, 1, 2)]
            found = await asyncio.gather(*(submit(each) for each in lines))
            assert [[best.text for best, _ in each] for each in found] == lines

    asyncio.run(run())
    assert translator.batches == [4, 4, 4, 3]


def test_clients_have_equal_shares_of_the_tokens():
    """A client of one line need not wait for the lines of another, nor for its long ones."""
    translator = _Recorder()

    async def run():
        async with _batcher(translator) as submit:
            sent = {"many": ["aaa"] * 8, "few": ["b"], "some": ["c"] * 6}
            await asyncio.gather(*(submit(lines, who) for who, lines in sent.items()))

    asyncio.run(run())
    assert translator.lines == ["aaa b c c", "aaa c c aaa", "c c aaa aaa", "aaa aaa aaa"]


def test_a_new_client_is_the_next():
    """The others' backlog, and what it was given long ago, don't matter."""
    translator = _Recorder()
    translator.secs = 0.05

    async def run():
        async with _batcher(translator) as submit:
            await submit(["c"] * 9, "new")
            many = [asyncio.create_task(submit(["a"] * 20, who)) for who in ("x", "y")]
            while len(translator.lines) < 5:
                await asyncio.sleep(0.01)
            await submit(["n"], "new")
            assert translator.lines[5].startswith("n ")
            await asyncio.gather(*many)

    asyncio.run(run())


def test_the_rows_of_a_batch_have_the_length_of_the_first():
    translator = _Recorder()

    async def run():
        async with _batcher(translator) as submit:
            sent = ("one", ["a", "b"], 16), ("two", ["c"] * 5, 32), ("three", ["d"], 64)
            await asyncio.gather(*(submit(lines, who, length) for who, lines, length in sent))

    asyncio.run(run())
    assert translator.lines == ["a b", "c c c c", "d", "c"]


@pytest.mark.parametrize(("num_partitions", "first"), [(1, ["short"]), (2, ["long"] * 2)])
def test_a_short_line_waits_for_no_long_one(num_partitions, first):
    """But on several devices, whose programs must not run side by side."""
    answered = []

    class Translator(_Recorder):
        num_rows = 1

        def translate_parts(self, parts):
            time.sleep(0.5 if parts[0].row_length > 16 else 0.0)
            return [(Translation(_text(part), 0.0, 1),) for part in parts]

    translator = Translator()
    spec = dataclasses.replace(_SPEC, source_lengths=(16, 32), num_partitions=num_partitions)
    translator.spec = spec

    async def run():
        async with _batcher(translator) as submit:

            async def send(line, row_length):
                await submit([line], "one", row_length)
                answered.append(line)

            long_ones = [asyncio.create_task(send("long", 32)) for _ in range(2)]
            await asyncio.sleep(0.05)
            await asyncio.gather(send("short", 16), *long_ones)

    asyncio.run(run())
    assert answered[: len(first)] == first and len(answered) == 3


def test_cancelled_requests_are_not_translated():
    """Neither those that wait, nor the rest of one whose first lines are being translated."""
    translator = _Shouter(secs=0.05)

    async def run():
        async with _batcher(translator) as submit:
            waiting = asyncio.create_task(submit(["a", "b"]))
            await asyncio.sleep(0)
            waiting.cancel()
            begun = asyncio.create_task(submit(["a"] * 50))
            while not translator.batches:
                await asyncio.sleep(0.01)
            begun.cancel()
            return await submit(["c"])

    assert asyncio.run(run())[0][0].text == "C" and translator.batches == [4, 1]


def test_cancelled_requests_take_no_room():
    async def run():
        async with _batcher(_Shouter(), client_tokens=8) as submit:
            cancelled = asyncio.create_task(submit(["a"] * 4))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.sleep(0)
            return len(await submit(["b"] * 4))

    assert asyncio.run(run()) == 4


def test_who_hung_up_keeps_the_turn():
    """What was not translated costs a client nothing."""
    translator = _Recorder()
    translator.secs = 0.05

    async def run():
        async with _batcher(translator) as submit:
            many = [asyncio.create_task(submit(["a"] * 40, who)) for who in ("x", "y")]
            while len(translator.lines) < 2:
                await asyncio.sleep(0.01)
            cancelled = asyncio.create_task(submit(["b"] * 100, "new"))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            begun = len(translator.lines)
            await submit(["n"], "new")
            assert len(translator.lines) <= begun + 2
            await asyncio.gather(*many)

    asyncio.run(run())


def test_closing_cancels_waiting_requests():
    async def run():
        async with _batcher(_Shouter(secs=0.2)) as submit:
            waiting = [asyncio.create_task(submit(["a"] * 4)) for _ in range(3)]
            await asyncio.sleep(0.05)
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert all(isinstance(one, asyncio.CancelledError) for one in asyncio.run(run()))


def test_a_full_queue_or_share_refuses():
    async def run():
        async with _batcher(_Shouter(), client_tokens=9, queued_tokens=12) as submit:
            first = asyncio.create_task(submit(["a"] * 4))
            await asyncio.sleep(0)
            with pytest.raises(ShareFull, match="8 tokens of yours wait; the limit is 9"):
                await submit(["b"])
            with pytest.raises(asyncio.QueueFull, match="8 tokens wait; the limit is 12"):
                await submit(["b"] * 3, "two")
            return len(await first), await submit([])

    assert asyncio.run(run()) == (4, [])


# --- clients behind a proxy, and the next model ---


def test_a_proxy_s_header_names_the_clients():
    """The last entry counts, which the proxy has added; the others are the client's own."""

    async def act(client):
        statuses = []

        async def one(forwarded):
            headers = {"X-Forwarded-For": forwarded} if forwarded else {}
            body = {"lines": ["a"] * 3}
            async with client.post("/translate", json=body, headers=headers) as answer:
                statuses.append((forwarded, answer.status))

        await asyncio.gather(*map(one, ["10.0.0.1"] * 3 + ["10.0.0.1, 10.0.0.2", None]))
        return statuses

    def busy():
        translator = _Shouter(secs=0.3)
        translator.num_rows = 1
        return translator

    limits = Limits(client_tokens=12)
    found = _with_client(act, busy(), limits, client_header="X-Forwarded-For")
    assert sorted(status for _, status in found) == [200] * 4 + [429]
    assert ("10.0.0.1", 429) in found
    assert [status for _, status in _with_client(act, busy(), limits)].count(429) == 3


def _errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_after_a_hangup_the_next_model_serves_and_the_last_one_ends_its_requests(capfd, caplog):
    """And what cannot be loaded is logged in one line."""
    first, second = _Shouter(secs=0.1), _Shouter(spec=dataclasses.replace(_SPEC, model="next"))
    found = [second, ValueError("weights\nare damaged")]

    def load():
        if isinstance(found[0], Exception):
            raise found.pop(0)
        return found.pop(0)

    async def model(client):
        async with client.get("/healthz") as answer:
            return (await answer.json())["model"]

    async def act(client):
        begun = asyncio.create_task(_post(client, {"lines": ["a"] * 20}))
        while not first.batches:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGHUP)
        while await model(client) != "next":
            await asyncio.sleep(0.01)
        assert sum(first.batches) < 20
        await _post(client, {"lines": ["b"]})
        assert len((await begun)["translations"]) == 20
        assert sum(first.batches) == 20 and second.batches == [1]
        os.kill(os.getpid(), signal.SIGHUP)
        while not _errors(caplog):
            await asyncio.sleep(0.01)
        await _post(client, {"lines": ["c"]})
        async with client.get("/metrics") as answer:
            return await answer.text()

    metrics = _with_client(act, first, load=load)
    assert 'loads_total{outcome="loaded"} 2.0' in metrics
    assert 'loads_total{outcome="refused"} 1.0' in metrics
    refusal = "serving: not loaded, the old model is kept: weights are damaged"
    assert _errors(caplog) == [refusal]
    assert capfd.readouterr().out == "Loaded toy\nLoaded next\n"
