"""The metrics' names, labels and buckets, as Prometheus reads them."""

import asyncio

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lingvo_gshard.decoding.text_decoder import Part
from lingvo_gshard.serving.metrics import Metrics


def _lines(metrics):
    async def run():
        app = web.Application()
        app.router.add_get("/metrics", metrics.handler())
        async with TestClient(TestServer(app)) as client, client.get("/metrics") as answer:
            return (await answer.text()).splitlines()

    return asyncio.run(run())


def test_batches_requests_and_loads_are_counted():
    metrics = Metrics(lambda: 7)
    metrics.count_batch([Part(np.zeros(n, np.int32), 16) for n in (2, 3, 4)])
    metrics.count_request("/translate", 200)
    metrics.count_request("/translate", 429)
    metrics.count_load(is_loaded=True)
    metrics.count_load(is_loaded=False)
    lines = _lines(metrics)
    for line in (
        "tokens_total 9.0",
        "queued_tokens 7.0",
        'batch_rows_bucket{le="2.0"} 0.0',
        'batch_rows_bucket{le="4.0"} 1.0',
        'requests_total{path="/translate",status="200"} 1.0',
        'requests_total{path="/translate",status="429"} 1.0',
        'loads_total{outcome="loaded"} 1.0',
        'loads_total{outcome="refused"} 1.0',
    ):
        assert line in lines


def test_servers_of_one_process_count_apart():
    first, second = Metrics(lambda: 0), Metrics(lambda: 0)
    first.lines.inc(3)
    assert "lines_total 3.0" in _lines(first) and "lines_total 0.0" in _lines(second)
