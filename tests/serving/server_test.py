"""The server: responses, errors, batches of several requests, and a full queue."""

import asyncio
import dataclasses
import re
import threading
import time

import pytest
from aiohttp.test_utils import TestClient, TestServer

from lingvo_gshard.decode.bundle import DecoderSpec
from lingvo_gshard.decode.translator import Attention, Translation
from lingvo_gshard.serving.app import Server
from lingvo_gshard.serving.batcher import Batcher, Limits

_SPEC = DecoderSpec("toy", ("de", "fr"), 4, (16,), 2, 1)


class _Shouter:
    """Translates lines to upper case, with `?` as the second best; records batch sizes."""

    def __init__(self, secs=0.0):
        self.secs, self.batches = secs, []
        self._busy = threading.Lock()

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


def test_a_request_larger_than_the_queue_is_too_large():
    async def act(client):
        await _post(client, {"lines": ["a"] * 5})
        return await _post(client, {"lines": ["a"] * 6}, status=413)

    answer = _with_client(act, limits=Limits(batch_lines=4, queued_lines=5))
    assert answer == {"error": "A request can have at most 5 lines, got 6."}


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
        for path in ("/health", "/languages", "/metrics"):
            async with client.get(path) as answer:
                assert answer.status == 200
                found.append(await answer.text())
        return found

    health, languages, metrics = _with_client(act)
    assert '"model": "toy"' in health and '["de", "fr"]' in languages
    for line in (
        "lines_total 2.0",
        'requests_total{path="/translate",status="200"} 1.0',
        'requests_total{path="/translate",status="400"} 1.0',
        "queued_lines 0.0",
        "translate_seconds_count 1.0",
    ):
        assert line in metrics.splitlines()


def test_nothing_is_lost_at_saturation():
    """Sends 300 requests at once to a queue of 40 lines: each gets its own answer in the end."""
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
                assert answer.status == 503 and answer.headers["Retry-After"] == "1"
                refused.append(i)
            await asyncio.sleep(0.01)

    async def act(client):
        return sum(await asyncio.gather(*(one(client, i) for i in range(300))))

    sent = _with_client(act, translator, Limits(batch_lines=16, queued_lines=40))
    assert sent == sum(translator.batches) == 600
    assert refused and max(translator.batches) <= 16
    assert len(translator.batches) < 150  # Requests shared batches.


# --- the batcher ---


def _results(translator):
    return lambda lines: list(translator.translate(lines))


def test_a_large_request_forms_its_own_batch_in_order():
    translator = _Shouter()

    async def run():
        async with Batcher(_results(translator), Limits(4, 100, 0.01)) as batcher:
            sizes = [3, 9, 1, 2]
            found = await asyncio.gather(*(batcher.submit(["x"] * n) for n in sizes))
            return [len(one) for one in found]

    assert asyncio.run(run()) == [3, 9, 1, 2] and translator.batches == [3, 9, 3]


def test_cancelled_requests_are_not_translated():
    translator = _Shouter()

    async def run():
        async with Batcher(_results(translator), Limits(8, 100, 0.05)) as batcher:
            cancelled = asyncio.create_task(batcher.submit(["a", "b"]))
            await asyncio.sleep(0)
            cancelled.cancel()
            return await batcher.submit(["c"])

    assert asyncio.run(run())[0][0].text == "C" and translator.batches == [1]


def test_cancelled_requests_take_no_room():
    async def run():
        async with Batcher(_results(_Shouter()), Limits(8, 4, 0.05)) as batcher:
            cancelled = asyncio.create_task(batcher.submit(["a"] * 4))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.sleep(0)
            return len(await batcher.submit(["b"] * 4))

    assert asyncio.run(run()) == 4


def test_closing_cancels_waiting_requests():
    async def run():
        async with Batcher(_results(_Shouter(secs=0.2)), Limits(1, 100, 0.0)) as batcher:
            waiting = [asyncio.create_task(batcher.submit(["a"])) for _ in range(3)]
            await asyncio.sleep(0.05)
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert all(isinstance(one, asyncio.CancelledError) for one in asyncio.run(run()))


def test_a_full_queue_refuses():
    async def run():
        async with Batcher(_results(_Shouter()), Limits(4, 5, 0.05)) as batcher:
            first = asyncio.create_task(batcher.submit(["a"] * 4))
            await asyncio.sleep(0)
            with pytest.raises(asyncio.QueueFull, match="4 lines are waiting, of at most 5"):
                await batcher.submit(["b"] * 2)
            return len(await first)

    assert asyncio.run(run()) == 4
