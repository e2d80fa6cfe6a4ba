"""Dynamic batching: translates the lines of several clients together, one batch at a time."""

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Self

from lingvo_gshard.decode.translator import NBest


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most source tokens of a line, a request, a batch, a client's queue and all queues.

    A longer line or request is never translated; one that would overfill a queue may come again.
    The first line of a batch waits `wait_secs` for others.
    """

    line_tokens: int = 4096
    request_tokens: int = 16_384
    batch_tokens: int = 4096
    client_tokens: int = 32_768
    queued_tokens: int = 65_536
    batch_lines: int = 64
    wait_secs: float = 0.005


class ShareFull(asyncio.QueueFull):
    """A client has as many tokens in the queue as it may have."""


@dataclasses.dataclass
class _Request:
    """Lines and their numbers of tokens; the first `num_taken` are translated or in a batch."""

    lines: Sequence[str]
    tokens: Sequence[int]
    result: asyncio.Future[list[NBest]]
    num_taken: int = 0
    found: list[NBest] = dataclasses.field(default_factory=list)

    @property
    def tokens_left(self) -> int:
        return 0 if self.result.done() else sum(self.tokens[self.num_taken :])


class Batcher:
    """Queues the lines of each client, and forms batches from one line of each client in turn.

    A client's lines are translated in order. An asynchronous context manager; closing it cancels
    the waiting requests.
    """

    def __init__(
        self,
        translate: Callable[[list[str]], list[NBest]],
        limits: Limits,
        warm_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`translate` returns one result per line; it runs in a thread, one call at a time.

        `warm_up` runs there before; then `is_ready` is true.
        """
        self._translate, self._limits, self._warm_up = translate, limits, warm_up
        # The client that was served longest ago comes first.
        self._waiting: dict[str, collections.deque[_Request]] = {}
        self._arrived = asyncio.Event()
        self.is_ready = False

    async def __aenter__(self) -> Self:
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_ready = False
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        for requests in self._waiting.values():
            for request in requests:
                request.result.cancel()

    @property
    def queued_tokens(self) -> int:
        """The number of waiting tokens, without those in translation and of cancelled requests."""
        return sum(map(self._queued_of, self._waiting))

    def _queued_of(self, client: str) -> int:
        return sum(request.tokens_left for request in self._waiting.get(client, ()))

    async def submit(self, client: str, lines: Sequence[str], tokens: Sequence[int]) -> list[NBest]:
        """Returns the translations of a request's lines, of so many tokens each, once all are done.

        Raises asyncio.QueueFull if there is no room for the lines; they may be sent again later.
        """
        limits, added = self._limits, sum(tokens)
        if (queued := self._queued_of(client)) + added > limits.client_tokens:
            raise ShareFull(f"{queued} tokens of yours wait, of at most {limits.client_tokens}.")
        if (queued := self.queued_tokens) + added > limits.queued_tokens:
            raise asyncio.QueueFull(f"{queued} tokens wait, of at most {limits.queued_tokens}.")
        if not lines:
            return []
        request = _Request(lines, tokens, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, collections.deque()).append(request)
        self._arrived.set()
        return await request.result

    async def _work(self) -> None:
        try:
            await asyncio.to_thread(self._warm_up)
            self.is_ready = True
        except Exception:
            logging.exception("serving: the first batch failed")
        while True:
            await self._arrived.wait()
            if self.queued_tokens < self._limits.batch_tokens:
                await asyncio.sleep(self._limits.wait_secs)
            batch = self._take()
            try:
                await self._run(batch)
            except asyncio.CancelledError:
                for request, _ in batch:
                    request.result.cancel()
                raise

    def _take(self) -> list[tuple[_Request, str]]:
        """Returns the lines of a batch, each with its request, without those of cancelled ones."""
        batch: list[tuple[_Request, str]] = []
        room = self._limits.batch_tokens
        while self._waiting and len(batch) < self._limits.batch_lines:
            client, requests = next(iter(self._waiting.items()))
            request = requests[0]
            if not request.result.done():
                if batch and request.tokens[request.num_taken] > room:
                    break
                room -= request.tokens[request.num_taken]
                batch.append((request, request.lines[request.num_taken]))
                request.num_taken += 1
            if request.result.done() or request.num_taken == len(request.lines):
                requests.popleft()
            del self._waiting[client]
            if requests:
                self._waiting[client] = requests
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _run(self, batch: list[tuple[_Request, str]]) -> None:
        try:
            found = await asyncio.to_thread(self._translate, [line for _, line in batch])
        except Exception as error:  # Reported to each request; the next batch may succeed.
            for request, _ in batch:
                if not request.result.done():
                    request.result.set_exception(error)
            return
        for (request, _), result in zip(batch, found, strict=True):
            request.found.append(result)
            if len(request.found) == len(request.lines) and not request.result.done():
                request.result.set_result(request.found)
