"""Dynamic batching: translates the lines of several requests together, one batch at a time."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.decode.translator import Translation

NBest = tuple[Translation, ...]


class QueueFullError(Exception):
    """The queue has no room for the lines of a request, which may be sent again later."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """The sizes of batches and of the queue.

    Attributes:
      batch_lines: lines translated together; a larger request forms a batch of its own.
      queued_lines: lines that may wait; a request that would exceed this is refused.
      wait_secs: how long the first request of a batch waits for others.
    """

    batch_lines: int = 64
    queued_lines: int = 1024
    wait_secs: float = 0.005


@dataclasses.dataclass(frozen=True)
class _Request:
    lines: Sequence[str]
    result: asyncio.Future[list[NBest]]


class Batcher:
    """Queues requests and translates them in batches, in the order of their arrival.

    An asynchronous context manager; closing it cancels the waiting requests.
    """

    def __init__(self, translate: Callable[[list[str]], list[NBest]], limits: Limits) -> None:
        """`translate` returns one result per line; it runs in a thread, one call at a time."""
        self._translate, self._limits = translate, limits
        self._queue: collections.deque[_Request] = collections.deque()
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Batcher:
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._worker is not None
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        for request in self._queue:
            request.result.cancel()

    @property
    def queued_lines(self) -> int:
        """The number of waiting lines, without those in translation and of cancelled requests."""
        waiting = (one for one in self._queue if not one.result.cancelled())
        return sum(len(request.lines) for request in waiting)

    async def submit(self, lines: Sequence[str]) -> list[NBest]:
        """Returns the translations of a request's lines once they are done.

        Raises:
          QueueFullError: the queue has no room for the lines.
        """
        if self.queued_lines + len(lines) > self._limits.queued_lines:
            raise QueueFullError(
                f"{self.queued_lines} lines are waiting, of at most {self._limits.queued_lines}."
            )
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
        except Exception as error:  # Reported to each request; the next batch may succeed.
            for request in batch:
                if not request.result.done():
                    request.result.set_exception(error)
            return
        for request in batch:
            results = [next(found) for _ in request.lines]
            if not request.result.done():
                request.result.set_result(results)
