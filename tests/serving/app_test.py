"""The server: its answers, limits and metrics, clients behind a proxy, and the next model."""

import asyncio
import dataclasses
import os
import re
import signal
import socket

import pytest

from lingvo_gshard.serving import app, connection
from lingvo_gshard.serving.batcher import Limits
from tests.serving.shouter import SPEC, Shouter, post, with_client


def test_json_lines_get_translations():
    async def act(client):
        return await post(client, {"lines": ["guten tag", ""], "nbest": 2, "source_lang": "de"})

    attention = {"source_pieces": ["a"], "target_pieces": ["A"], "weights": [[1.0]]}
    want = {"text": "GUTEN TAG", "score": -0.5, "num_tokens": 2, "attention": attention}
    want["finish"] = "stop"
    (first, second), other = with_client(act)["translations"]
    assert first == want and second["text"] == "?" and other[0]["text"] == ""


def test_tokens_have_scores_on_request():
    async def act(client):
        return await post(client, {"lines": ["tag"], "token_scores": True})

    ((best,),) = with_client(act)["translations"]
    first, end = best["tokens"]
    assert first == {"id": 65, "piece": "A", "log_prob": -0.75} and end["piece"] == "</s>"


def test_a_line_or_request_of_too_many_tokens_is_too_large():
    async def act(client):
        await post(client, {"lines": ["a"] * 5})
        found = [await post(client, {"lines": ["a"] * 6}, status=413)]
        return [*found, await post(client, {"lines": ["abcdefg"]}, status=413)]

    request, line = with_client(act, limits=Limits(line_tokens=7, request_tokens=10))
    assert request == {"error": "A request can have at most 10 tokens, got 12; split it."}
    assert line == {"error": "A line can have at most 7 tokens, got 8; split it."}


def test_after_a_failure_the_next_request_succeeds():
    async def act(client):
        failed = await post(client, {"lines": ["raise"]}, status=500)
        fine = await post(client, {"lines": ["ab"]})
        return failed["error"], fine["translations"][0][0]["text"]

    assert with_client(act) == ("Decoding failed.", "AB")


@pytest.mark.parametrize("body", [{"json": {"lines": ["ab", "nan"]}}, {"data": "ab\nnan"}])
def test_a_line_without_a_result_is_named_and_others_are_answered(body):
    """Even lines of another request in the same batch."""

    async def act(client):
        async def bad():
            async with client.post("/translate", **body) as answer:
                return answer.status, await answer.json()

        fine = post(client, {"lines": ["c", "d"]})
        return await asyncio.gather(bad(), fine)

    translator = Shouter()
    (status, failed), fine = with_client(act, translator, Limits(wait_secs=0.2))
    message = "line 2 has no translation: the model's numbers for it are not finite (NaN or infin"
    assert status == 500 and failed["error"].startswith(message)
    assert [best["text"] for best, *_ in fine["translations"]] == ["C", "D"]
    assert translator.batches == [4]


def test_a_model_of_several_targets_needs_to_know_which():
    spec = dataclasses.replace(SPEC, languages=("de", "en-de", "en-ben"), targets=("de", "en"))

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

    (german, english, *errors), languages = with_client(act, Shouter(spec=spec))
    assert '"<2DE> TAG"' in german and english == "<2EN> X\n"
    assert errors == [
        f"target_lang {code}: expected one of de, en" for code in ("is missing", "fr")
    ]
    assert languages == {"languages": ["de", "en"], "targets": ["de", "en"], "named_sources": False}


def test_a_model_with_tokens_of_languages_needs_both():
    codes = ("deu_Latn", "fra_Latn")
    spec = dataclasses.replace(SPEC, sources=codes, targets=codes)
    body = {"lines": ["tag"], "source_lang": "deu_Latn", "target_lang": "fra_Latn"}

    async def act(client):
        answer = await post(client, body)
        query = "?source_lang=fra_Latn&target_lang=deu_Latn"
        async with client.post(f"/translate{query}", data="x") as plain:
            found = [answer["translations"][0][0]["text"], await plain.text()]
        for wrong, path in (
            ({"source_lang": None}, ""),
            ({"target_lang": "deu"}, ""),
            ({"target_lang": 5}, ""),
            ({}, "?target_lang=deu_Latn"),
        ):
            refused = await post(client, body | wrong, 400, f"/translate{path}")
            found.append(refused["error"])
        async with client.get("/languages") as languages:
            return found, await languages.json()

    (text, plain, *errors), languages = with_client(act, Shouter(spec=spec))
    assert text == "DEU_LATN FRA_LATN TAG" and plain == "FRA_LATN DEU_LATN X\n"
    assert errors == [
        "source_lang is missing: expected one of deu_Latn, fra_Latn",
        "target_lang deu: expected one of deu_Latn, fra_Latn. Did you mean deu_Latn?",
        "target_lang: expected the code of a language, got 5.",
        "target_lang: 'deu_Latn' in the query, but 'fra_Latn' in the body.",
    ]
    assert languages["named_sources"] and languages["languages"] == list(codes)


def test_health_languages_and_metrics():
    async def act(client):
        await post(client, {"lines": ["ab", "cd"]})
        await post(client, {}, status=400)
        found = []
        for path in ("/healthz", "/languages", "/metrics"):
            async with client.get(path) as answer:
                assert answer.status == 200
                found.append(await answer.text())
        return found

    health, languages, metrics = with_client(act)
    assert '"model": "toy"' in health and '["de", "fr"]' in languages
    for line in (
        "lingvo_gshard_lines_total 2.0",
        "lingvo_gshard_tokens_total 6.0",
        'lingvo_gshard_requests_total{path="/translate",status="200"} 1.0',
        'lingvo_gshard_requests_total{path="/translate",status="400"} 1.0',
        "lingvo_gshard_queued_tokens 0.0",
        "lingvo_gshard_translate_seconds_count 1.0",
        'lingvo_gshard_batch_rows_bucket{le="1.0"} 0.0',
        'lingvo_gshard_batch_rows_bucket{le="2.0"} 1.0',
    ):
        assert line in metrics.splitlines()
    assert "process_resident_memory_bytes " in metrics


@pytest.mark.slow
def test_nothing_is_lost_at_saturation():
    """Sends 300 requests at once to a queue of 240 tokens: each gets its own answer in the end."""
    translator, refused = Shouter(secs=0.002), []

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

    sent = with_client(act, translator, Limits(queued_tokens=240))
    assert sent == sum(translator.batches) == 600
    assert refused and len(translator.batches) < 200  # Requests shared batches.


def test_the_server_is_ready_after_a_first_batch_and_while_its_queue_has_room():
    async def act(client):
        found = []
        for _ in range(60):
            async with client.get("/readyz") as answer:
                found.append(answer.status)
            await asyncio.sleep(0.01)
        first = asyncio.create_task(post(client, {"lines": ["ab", "cd"]}))
        await asyncio.sleep(0.1)  # Its first line is being translated.
        second = asyncio.create_task(post(client, {"lines": ["ab", "cd"]}))
        await asyncio.sleep(0.05)
        async with client.get("/readyz") as answer:
            assert answer.status == 503
            error = (await answer.json())["error"]
        await asyncio.gather(first, second)
        return found, error

    limits = Limits(client_tokens=99, queued_tokens=9)
    translator = Shouter(secs=0.2)
    translator.num_rows = 1
    found, error = with_client(act, translator, limits)
    assert found[0] == 503 and found[-1] == 200 and found == sorted(found, reverse=True)
    assert error == "The queue is full."


def test_the_description_names_every_path():
    async def act(client):
        routes = {route.resource.canonical for route in client.app.router.routes()}
        async with client.get("/openapi.json") as answer:
            return routes, await answer.json()

    routes, description = with_client(act)
    assert set(description["paths"]) == routes and description["openapi"].startswith("3.")


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port={port} on 127.0.0.1: Address already in"):
            app.serve(Shouter(), "127.0.0.1", port)
    assert not capsys.readouterr().out


def test_the_port_that_was_found_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(connection, "run", lambda _, listener: listener.close())
    app.serve(Shouter(), "127.0.0.1", 0)
    assert re.fullmatch(r"Serving toy on http://127.0.0.1:[1-9]\d*\n", capsys.readouterr().out)


@pytest.mark.slow
def test_a_proxy_s_header_names_the_clients():
    """The last entry counts, which the proxy added; the others are the client's own."""

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
        translator = Shouter(secs=0.3)
        translator.num_rows = 1
        return translator

    limits = Limits(client_tokens=12)
    found = with_client(act, busy(), limits, client_header="X-Forwarded-For")
    assert sorted(status for _, status in found) == [200] * 4 + [429]
    assert ("10.0.0.1", 429) in found
    assert [status for _, status in with_client(act, busy(), limits)].count(429) == 3


def _errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_after_a_hangup_the_next_model_serves_and_the_last_one_ends_its_requests(capfd, caplog):
    """A model that cannot be loaded is logged in one line."""
    first, second = Shouter(secs=0.1), Shouter(spec=dataclasses.replace(SPEC, model="next"))
    found = [second, ValueError("weights\nare damaged")]

    def load():
        if isinstance(found[0], Exception):
            raise found.pop(0)
        return found.pop(0)

    async def model(client):
        async with client.get("/healthz") as answer:
            return (await answer.json())["model"]

    async def act(client):
        begun = asyncio.create_task(post(client, {"lines": ["a"] * 20}))
        while not first.batches:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGHUP)
        while await model(client) != "next":
            await asyncio.sleep(0.01)
        assert sum(first.batches) < 20
        await post(client, {"lines": ["b"]})
        assert len((await begun)["translations"]) == 20
        assert sum(first.batches) == 20 and second.batches == [1]
        os.kill(os.getpid(), signal.SIGHUP)
        while not _errors(caplog):
            await asyncio.sleep(0.01)
        await post(client, {"lines": ["c"]})
        async with client.get("/metrics") as answer:
            return await answer.text()

    metrics = with_client(act, first, load=load)
    assert 'lingvo_gshard_loads_total{outcome="loaded"} 2.0' in metrics
    assert 'lingvo_gshard_loads_total{outcome="refused"} 1.0' in metrics
    refusal = "serving: loading failed, the old model is kept: weights are damaged"
    assert _errors(caplog) == [refusal]
    assert capfd.readouterr().out == "Loaded toy\nLoaded next\n"
