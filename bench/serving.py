"""Tests `serve` under load, with a real server in a separate process and many clients.

    python -m bench.serving --served=BUNDLE --lines=FILE [--connections=500] [--secs=60]

Each line of FILE is text in the source language, or a prompt for a language model. A model with
language tokens translates from its first language into its last one. Two loads follow each other:

saturation: every connection sends requests of 1 to 32 lines without pauses, except for the seconds
    that a refusal asks for. Half of the connections share one address, so that the server refuses
    this client with 429; each of the others has a separate address, and is refused with 503. An
    answer is lost if it is missing, or has another status or number of lines. At the end, all
    connections are closed. The memory is the sum over all servers. --servers=N spreads the load
    over N servers; --reload makes them load the bundle again at each sample of the memory.
neighbour: one client sends one line at a time, from the shortest tenth of the lines, first alone
    and then beside another client. The other client has 8 connections that send the largest
    requests allowed without any pause, not even after a refusal.

All addresses are in 127.0.0.0/8, which Linux provides without configuration.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import aiohttp
import numpy as np
from absl import flags

from lingvo_gshard import cli
from lingvo_gshard.decoding import bundle_spec
from lingvo_gshard.input.manifest import Kind
from lingvo_gshard.input.tokenizer import Tokenizer, vocabulary_files
from lingvo_gshard.serving import messages
from lingvo_gshard.serving.batcher import Limits
from xla_spmd.files import table

_SERVED = flags.DEFINE_string("served", None, "A bundle.", required=True)
_LINES = flags.DEFINE_string("lines", None, "A file of text to translate.", required=True)
_CONNECTIONS = flags.DEFINE_integer("connections", 500, "At saturation.", lower_bound=2)
_SECS = flags.DEFINE_integer("secs", 60, "For each load.", lower_bound=1)
_SERVERS = flags.DEFINE_integer("servers", 1, "Processes that share the load.", lower_bound=1)
_RELOAD = flags.DEFINE_bool("reload", False, "Load the bundle again and again at saturation.")
_MOST_LINES = 32
_ATTACKERS = 8
_SAMPLES = 6  # The samples of the memory.
_PERCENTILES = (50, 95, 99)


@dataclasses.dataclass
class Served:
    """The seconds of each answered request, and the number of other requests by their status."""

    sent: int = 0
    secs: list[float] = dataclasses.field(default_factory=list)
    others: collections.Counter[int | str] = dataclasses.field(default_factory=collections.Counter)

    def percentiles(self) -> np.ndarray:
        """Returns the percentiles in seconds; NaN without an answered request."""
        return np.percentile(self.secs or [np.nan], _PERCENTILES)

    def cells(self) -> list[str]:
        """Returns the percentiles in milliseconds."""
        return [f"{1e3 * secs:.0f}" for secs in self.percentiles()]


@dataclasses.dataclass(frozen=True)
class Asked:
    """The route and the fields of requests, which depend on the model's kind and languages."""

    route: messages.Route
    fields: dict[str, str]

    def body(self, lines: Sequence[str]) -> dict[str, object]:
        """Returns the body of a request."""
        return {self.route.lines: list(lines), **self.fields}


@dataclasses.dataclass(frozen=True)
class Server:
    """A server's process and its address."""

    process: subprocess.Popen[str]
    url: str


def main() -> None:
    lines = pathlib.Path(_LINES.value).read_text("utf-8").splitlines()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_server(_SERVED.value)) for _ in range(_SERVERS.value)]
        asyncio.run(_loads(servers, lines))


async def _loads(servers: Sequence[Server], lines: Sequence[str]) -> None:
    await asyncio.gather(*(_until_ready(server.url) for server in servers))
    asked = await _asked(servers[0].url)
    print(await saturation(servers, asked, lines), flush=True)
    print(await neighbour(servers[0].url, asked, lines))


async def _asked(url: str) -> Asked:
    """Returns the route and the fields of requests to a server."""
    async with _session("127.0.0.1") as session:
        async with session.get(f"{url}/healthz") as answer:
            kind = (await answer.json())["kind"]
        async with session.get(f"{url}/languages") as answer:
            languages = await answer.json()

    fields = {}
    if languages["targets"]:
        fields["target_lang"] = languages["targets"][-1]
    if languages["named_sources"]:
        fields["source_lang"] = languages["languages"][0]
    (route,) = [route for route in messages.ROUTES if route.kind == kind]
    return Asked(route, fields)


async def saturation(servers: Sequence[Server], asked: Asked, lines: Sequence[str]) -> str:
    """Returns the outcomes of all requests, and the servers' memory, as text."""
    end = time.monotonic() + _SECS.value
    served = Served()
    before = await _metric(servers, "lingvo_gshard_tokens_total")

    # Every second connection has a separate address; the others share one.
    async with contextlib.AsyncExitStack() as stack:
        shared = await stack.enter_async_context(_session("127.0.0.1"))
        tasks = []
        for i, server in zip(range(_CONNECTIONS.value), itertools.cycle(servers)):
            session = shared
            if i % 2:
                own = _session(f"127.1.{i // 250}.{1 + i % 250}")
                session = await stack.enter_async_context(own)
            requests = _requests(lines, i)
            tasks.append(
                asyncio.create_task(_send(session, server.url, asked, requests, end, served))
            )

        memory = [await _sampled(servers) for _ in range(_SAMPLES)]
        tokens = await _metric(servers, "lingvo_gshard_tokens_total") - before
        unanswered = served.sent - len(served.secs) - served.others.total()
        await _stop(tasks)

    counts = {"answered": len(served.secs), "unanswered": unanswered}
    counts |= {str(status): served.others.pop(status, 0) for status in (429, 503)}
    counts["lost"] = served.others.total()
    rates = {"requests/s": len(served.secs) / _SECS.value, "tokens/s": tokens / _SECS.value}

    header = [*counts, *rates, "p50 ms", "p95", "p99"]
    row = [*counts.values(), *(f"{rate:.1f}" for rate in rates.values()), *served.cells()]
    mib = " ".join(f"{sample:.0f}" for sample in memory)
    return f"{table.text([header, row])}\nMiB {mib}; lost {dict(served.others)}"


async def neighbour(url: str, asked: Asked, lines: Sequence[str]) -> str:
    """Returns the latency of short lines, alone and beside a client that sends without pauses."""
    alone = Served()
    beside = Served()
    attack = Served()
    largest = _largest(asked, lines)
    short = sorted(lines, key=len)[: max(len(lines) // 10, 1)]
    async with _session("127.0.0.1") as session, _session("127.0.0.2") as other:
        singles = ([line] for line in itertools.cycle(short))
        await _send(session, url, asked, singles, time.monotonic() + _SECS.value, alone)

        # The second measurement starts after the other client has filled its queues.
        end = time.monotonic() + _SECS.value
        attacks = []
        for _ in range(_ATTACKERS):
            sending = _send(other, url, asked, itertools.repeat(largest), end, attack, False)
            attacks.append(asyncio.create_task(sending))
        await asyncio.sleep(1)
        await _send(session, url, asked, singles, end, beside)
        await _stop(attacks)
    ratios = beside.percentiles() / alone.percentiles()
    rows = [
        ("a line", "answered", "p50 ms", "p95", "p99"),
        ("alone", len(alone.secs), *alone.cells()),
        ("beside", len(beside.secs), *beside.cells()),
        ("ratio", "", *(f"{ratio:.2f}" for ratio in ratios)),
        ("the other", len(attack.secs), *attack.cells()),
    ]
    others = f"not answered: {dict(beside.others)}, of the other's {dict(attack.others)}"
    return f"{table.text(rows)}\n{others}"


@contextlib.contextmanager
def _server(folder: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "lingvo_gshard.serve", f"--bundle={folder}", "--port=0"]
    process = subprocess.Popen(
        [*command, "--platform=cpu"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"the server does not start: {' '.join(command)}"
        yield Server(process, line.split()[-1])
    finally:
        process.terminate()
        process.wait()


def _session(address: str) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, local_addr=(address, 0))
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())


async def _until_ready(url: str) -> None:
    async with _session("127.0.0.1") as session:
        while True:
            async with session.get(f"{url}/readyz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.2)


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    asked: Asked,
    requests: Iterator[list[str]],
    end: float,
    served: Served,
    waits: bool = True,
) -> None:
    """Sends one request after the other until `end`; obeys Retry-After if `waits`."""
    while time.monotonic() < end:
        lines = next(requests)
        began = time.monotonic()
        pause = 0
        served.sent += 1

        try:
            sent = session.post(f"{url}{asked.route.path}", json=asked.body(lines))
            async with sent as answer:
                found = await answer.json()
                if answer.status == 200 and len(found[asked.route.results]) == len(lines):
                    served.secs.append(time.monotonic() - began)
                    continue
                served.others[answer.status] += 1
                pause = int(answer.headers.get("Retry-After", 0)) if waits else 0
        except (aiohttp.ClientError, OSError) as error:
            served.others[type(error).__name__] += 1

        await asyncio.sleep(pause)


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _requests(lines: Sequence[str], seed: int) -> Iterator[list[str]]:
    rng = np.random.default_rng(seed)
    while True:
        yield [lines[i] for i in rng.integers(len(lines), size=rng.integers(1, _MOST_LINES + 1))]


def _largest(asked: Asked, lines: Sequence[str]) -> list[str]:
    """Returns the longest allowed lines, as many as a request may have."""
    tokenizer = Tokenizer(vocabulary_files(_SERVED.value, asked.route.kind)[0])
    limits = Limits()
    # Long lines are split for translation, but a prompt must fit as a whole.
    longest = limits.line_tokens
    if asked.route.kind == Kind.TEXT:
        longest = min(longest, bundle_spec.load_spec(_SERVED.value).input_lengths[-1])

    text = []
    size = 1
    for line in itertools.cycle(lines):
        size += len(tokenizer.encode(line))
        if size > longest:
            break
        text.append(line)
    return [" ".join(text)] * (limits.request_tokens // longest)


async def _sampled(servers: Sequence[Server]) -> float:
    """Waits for a sample's share of the seconds; returns the memory of all servers in MiB."""
    await asyncio.sleep(_SECS.value / _SAMPLES)
    if _RELOAD.value:
        for server in servers:
            server.process.send_signal(signal.SIGHUP)
    return await _metric(servers, "process_resident_memory_bytes") / 2**20


async def _metric(servers: Sequence[Server], name: str) -> float:
    """Returns the sum of a metric over the servers."""
    total = 0.0
    async with _session("127.0.0.1") as session:
        for server in servers:
            async with session.get(f"{server.url}/metrics") as answer:
                found = re.search(rf"^{name} (\S+)", await answer.text(), re.MULTILINE)
            assert found, name
            total += float(found[1])
    return total


if __name__ == "__main__":
    cli.run("serving", main)
