"""The server: responses, errors, batches of several requests, and a full queue."""

import asyncio
import dataclasses
import json
import re
import socket
import threading
import time

import pytest
from aiohttp.test_utils import TestClient, TestServer

from lingvo_gshard.decode.bundle import DecoderSpec
from lingvo_gshard.decode.translator import Attention, Translation
from lingvo_gshard.serving import app
from lingvo_gshard.serving.app import Server
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull

_SPEC = DecoderSpec("toy", ("de", "fr"), 4, (16,), 2, 1)


class _Shouter:
    """Translates lines to upper case, with `?` as the second best; records batch sizes."""

    def __init__(self, secs=0.0):
        self.secs, self.batches = secs, []
        self._busy = threading.Lock()

    def num_tokens(self, lines):
        """A token a letter, and one for the end."""
        return [len(line) + 1 for line in lines]

    def warm_up(self):
        time.sleep(self.secs)

    def translate_together(self, lines):
        return list(self.translate(lines))

    def translate(self, lines):
        assert self._busy.acquire(blocking=False), "two batches at once"
        lines = list(lines)
        if "raise" in lines:
            self._busy.release()
            raise RuntimeError("the device is gone")
        self.batches.append(len(lines))
        time.sleep(self.secs)
        self._busy.release()
        drawn = Attention(("a",), ("A",), ((1.0,),))
        for line in lines:
            yield (Translation(line.upper(), -0.5, 2, drawn), Translation("?", -2.0, 1))


def _with_client(act, translator=None, limits=None):
    """Runs `act(client)` against a server on a port of this machine."""

    async def run():
        server = Server(translator or _Shouter(), _SPEC, limits)
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
        ({"lines": ["ab"], "n_best": 1}, "Unknown n_best, expected lines, nbest, source_lang"),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(body, message):
    async def act(client):
        return await _post(client, body, status=400)

    assert re.search(message, _with_client(act)["error"])


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


def test_a_model_of_several_targets_needs_to_know_which(monkeypatch):
    spec = dataclasses.replace(_SPEC, languages=("de", "en-de", "en-ben"), targets=("de", "en"))
    monkeypatch.setitem(globals(), "_SPEC", spec)

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

    (german, english, *errors), languages = _with_client(act)
    assert '"<2DE> TAG"' in german and english == "<2EN> X\n"
    assert errors == [f"target_lang {code}: expected one of de, en" for code in (None, "fr")]
    assert languages == {"languages": ["de", "en"], "targets": ["de", "en"]}


def test_health_languages_and_metrics():
    async def act(client):
        await _post(client, {"lines": ["ab", "cd"]})
        await _post(client, {}, status=400)
        found = []
        for path in ("/healthz", "/health", "/languages", "/metrics"):
            async with client.get(path) as answer:
                assert answer.status == 200
                found.append(await answer.text())
        return found

    health, also, languages, metrics = _with_client(act)
    assert health == also and '"model": "toy"' in health and '["de", "fr"]' in languages
    for line in (
        "lines_total 2.0",
        "tokens_total 6.0",
        'requests_total{path="/translate",status="200"} 1.0',
        'requests_total{path="/translate",status="400"} 1.0',
        "queued_tokens 0.0",
        "translate_seconds_count 1.0",
    ):
        assert line in metrics.splitlines()


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

    sent = _with_client(act, translator, Limits(batch_lines=16, queued_tokens=240))
    assert sent == sum(translator.batches) == 600
    assert refused and max(translator.batches) <= 16
    assert len(translator.batches) < 150  # Requests shared batches.


_ERRORS = [
    (b"[" * 100_000, {"Content-Type": "application/json"}, 400, "not JSON"),
    (b"junk", {"Content-Type": "text/plain", "Content-Encoding": "gzip"}, 400, "gzip"),
    (b"a", {"Content-Type": "text/plain; charset=klingon"}, 415, "unknown encoding: klingon"),
    (b"\xff", {"Content-Type": "application/json; charset=ascii"}, 400, "not JSON"),
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

    limits = Limits(batch_tokens=3, batch_lines=1, client_tokens=99, queued_tokens=9)
    found, error = _with_client(act, _Shouter(secs=0.2), limits)
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
            app.serve(_Shouter(), _SPEC, "127.0.0.1", port)
    assert not capsys.readouterr().out


def test_the_port_that_was_found_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(app.web, "run_app", lambda _, sock, **settings: sock.close())
    app.serve(_Shouter(), _SPEC, "127.0.0.1", 0)
    assert re.fullmatch(r"Serving toy on http://127.0.0.1:[1-9]\d*\n", capsys.readouterr().out)


# --- the batcher ---


def _results(translator):
    return lambda lines: list(translator.translate(lines))


def _submit(batcher, lines, client="one"):
    return batcher.submit(client, lines, [len(line) + 1 for line in lines])


def test_a_large_request_is_translated_in_several_batches_in_order():
    translator = _Shouter()

    async def run():
        async with Batcher(_results(translator), Limits(batch_lines=4)) as batcher:
            lines = [[f"{n} {i}" for i in range(n)] for n in (3, 9, 1, 2)]
            found = await asyncio.gather(*(_submit(batcher, each) for each in lines))
            assert [[best.text for best, _ in each] for each in found] == lines

    asyncio.run(run())
    assert translator.batches == [4, 4, 4, 3]


def test_clients_take_turns():
    """A client of one line need not wait for the hundred lines of another."""
    translator, batches = _Shouter(), []

    def translate(lines):
        batches.append("".join(lines))
        return list(translator.translate(lines))

    async def run():
        async with Batcher(translate, Limits(batch_tokens=8)) as batcher:
            sent = {"many": ["a"] * 100, "few": ["b"], "some": ["c"] * 3}
            await asyncio.gather(*(_submit(batcher, lines, who) for who, lines in sent.items()))

    asyncio.run(run())
    assert batches == ["abca", "caca", *["aaaa"] * 24]


def test_a_long_line_forms_its_own_batch():
    translator = _Shouter()

    async def run():
        async with Batcher(_results(translator), Limits(batch_tokens=8)) as batcher:
            return await _submit(batcher, ["a", "b" * 30, "c", "d"])

    assert len(asyncio.run(run())) == 4 and translator.batches == [1, 1, 2]


def test_cancelled_requests_are_not_translated():
    """Neither those that wait, nor the rest of one whose first lines are being translated."""
    translator = _Shouter(secs=0.05)

    async def run():
        async with Batcher(_results(translator), Limits(batch_lines=2)) as batcher:
            waiting = asyncio.create_task(_submit(batcher, ["a", "b"]))
            await asyncio.sleep(0)
            waiting.cancel()
            begun = asyncio.create_task(_submit(batcher, ["a"] * 50))
            while not translator.batches:
                await asyncio.sleep(0.01)
            begun.cancel()
            return await _submit(batcher, ["c"])

    assert asyncio.run(run())[0][0].text == "C" and translator.batches == [2, 1]


def test_cancelled_requests_take_no_room():
    async def run():
        limits = Limits(client_tokens=8)
        async with Batcher(_results(_Shouter()), limits) as batcher:
            cancelled = asyncio.create_task(_submit(batcher, ["a"] * 4))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.sleep(0)
            return len(await _submit(batcher, ["b"] * 4))

    assert asyncio.run(run()) == 4


def test_closing_cancels_waiting_requests():
    async def run():
        async with Batcher(_results(_Shouter(secs=0.2)), Limits(batch_lines=1)) as batcher:
            waiting = [asyncio.create_task(_submit(batcher, ["a"])) for _ in range(3)]
            await asyncio.sleep(0.05)
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert all(isinstance(one, asyncio.CancelledError) for one in asyncio.run(run()))


def test_a_full_queue_or_share_refuses():
    async def run():
        limits = Limits(client_tokens=9, queued_tokens=12)
        async with Batcher(_results(_Shouter()), limits) as batcher:
            first = asyncio.create_task(_submit(batcher, ["a"] * 4))
            await asyncio.sleep(0)
            with pytest.raises(ShareFull, match="8 tokens of yours wait, of at most 9"):
                await _submit(batcher, ["b"])
            with pytest.raises(asyncio.QueueFull, match="8 tokens wait, of at most 12"):
                await _submit(batcher, ["b"] * 3, "two")
            return len(await first), await _submit(batcher, [])

    assert asyncio.run(run()) == (4, [])
