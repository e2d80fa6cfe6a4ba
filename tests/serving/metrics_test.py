"""The metrics' names, labels and buckets, as Prometheus reads them."""

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lingvo_gshard.serving.metrics import Metrics


def _lines(metrics):
    async def run():
        app = web.Application()
        app.router.add_get("/metrics", metrics.handler())
        async with TestClient(TestServer(app)) as client, client.get("/metrics") as answer:
            return (await answer.text()).splitlines()

    return asyncio.run(run())


def test_servers_of_one_process_count_apart():
    first, second = Metrics(lambda: 0), Metrics(lambda: 0)
    first.lines.inc(3)
    assert "lingvo_gshard_lines_total 3.0" in _lines(
        first
    ) and "lingvo_gshard_lines_total 0.0" in _lines(second)
