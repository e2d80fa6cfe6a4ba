"""Dynamic batching: translates the lines of several requests together, one batch at a time."""

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Self

from lingvo_gshard.decode.translator import NBest


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes of batches and of the queue, in lines."""

    batch_lines: int = 64  # A larger request forms its own batch.
    queued_lines: int = 1024  # More are refused.
    wait_secs: float = 0.005  # For requests to join the first of a batch.


@dataclasses.dataclass(frozen=True)
class _Request:
    lines: Sequence[str]
    result: asyncio.Future[list[NBest]]


class Batcher:
    """Translates requests in batches, in the order they come; closing it cancels waiting ones."""

    def __init__(self, translate: Callable[[list[str]], list[NBest]], limits: Limits) -> None:
        """`translate` returns one result per line; it runs in a thread, one call at a time."""
        self._translate, self._limits = translate, limits
        self._queue: collections.deque[_Request] = collections.deque()
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        for request in self._queue:
            request.result.cancel()

    @property
    def queued_lines(self) -> int:
        """The number of waiting lines, without those in translation and of cancelled requests."""
        return sum(len(one.lines) for one in self._queue if not one.result.cancelled())

    async def submit(self, lines: Sequence[str]) -> list[NBest]:
        """Returns a request's translations once done; asyncio.QueueFull if there is no room."""
        waiting, most = self.queued_lines, self._limits.queued_lines
        if waiting + len(lines) > most:
            raise asyncio.QueueFull(f"{waiting} lines are waiting, of at most {most}.")
        request = _Request(lines, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        self._arrived.set()
        return await request.result

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            if self.queued_lines < self._limits.batch_lines:
                await asyncio.sleep(self._limits.wait_secs)
            batch = self._take()
            try:
                await self._run(batch)
            finally:
                for request in batch:
                    request.result.cancel()  # Has no effect on requests with a result.

    def _take(self) -> list[_Request]:
        """Returns the first requests that fit into a batch, without cancelled ones."""
        batch: list[_Request] = []
        room = self._limits.batch_lines
        while self._queue and (not batch or len(self._queue[0].lines) <= room):
            request = self._queue.popleft()
            if not request.result.cancelled():
                batch.append(request)
                room -= len(request.lines)
        if not self._queue:
            self._arrived.clear()
        return batch

    async def _run(self, batch: list[_Request]) -> None:
        lines = [line for request in batch for line in request.lines]
        try:
            found = iter(await asyncio.to_thread(self._translate, lines))
            for request in batch:
                results = [next(found) for _ in request.lines]
                if not request.result.done():
                    request.result.set_result(results)
        except Exception as error:  # Reported to each request; the next batch may succeed.
            for request in batch:
                if not request.result.done():
                    request.result.set_exception(error)
