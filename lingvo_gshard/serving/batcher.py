"""Dynamic batching: fills the rows of each run of a program with parts from several clients."""

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.text_decoder import NBest, Part, TextDecoder
from lingvo_gshard.serving.fair_queue import Batch, FairQueue, Row


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest numbers of source tokens in a line, a request, a client's queue and the queue.

    A longer line or request can never be decoded. A request that finds too little room in the queue
    is refused, too, but the client may retry it later.
    """

    line_tokens: int = 4096
    request_tokens: int = 16_384
    client_tokens: int = 32_768
    queued_tokens: int = 65_536
    # How long parts that do not fill a batch wait for more parts.
    wait_secs: float = 0.005


class ShareFull(asyncio.QueueFull):
    """A client already has as many tokens in the queue as it may have."""


class Batcher:
    """Forms batches of the parts of all clients; one run of a program decodes a batch.

    Short and long rows wait in separate lanes, whose batches run side by side, so that a short line
    does not wait for a batch of long ones. A decoder on several devices has only one lane. Leaving
    the context cancels the waiting requests. `observe` is called with each batch.
    """

    def __init__(
        self, limits: Limits, observe: Callable[[list[Part]], None] = lambda parts: None
    ) -> None:
        self._limits = limits
        self._short = _Lane(limits.wait_secs, observe)
        self._long = _Lane(limits.wait_secs, observe)
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for lane in (self._short, self._long):
            self._workers.append(asyncio.create_task(lane.work()))
        return self

    async def __aexit__(self, *_: object) -> None:
        # A run of a program cannot be interrupted: its thread ends with the run.
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

        for row in self._waiting():
            row.result.cancel()

    def _waiting(self) -> Iterator[Row]:
        yield from self._short.queue
        yield from self._long.queue

    @property
    def queued_tokens(self) -> int:
        """The number of waiting tokens, without tokens in decoding and of cancelled requests."""
        return sum(row.tokens for row in self._waiting())

    def check_room(self, client: str, added: int) -> None:
        """Raises asyncio.QueueFull if `added` tokens of a client do not fit into the queue now.

        The error is ShareFull if the client's own tokens are in the way. A request larger than a
        limit has room when no other tokens wait.
        """
        limits = self._limits

        own = sum(row.tokens for row in self._waiting() if row.client == client)
        if own > 0 and own + added > limits.client_tokens:
            raise ShareFull(f"{own} of your tokens wait; the limit is {limits.client_tokens}.")

        queued = self.queued_tokens
        if queued > 0 and queued + added > limits.queued_tokens:
            raise asyncio.QueueFull(f"{queued} tokens wait; the limit is {limits.queued_tokens}.")

    async def submit(
        self, client: str, text_decoder: TextDecoder, parts: Sequence[Part]
    ) -> list[NBest]:
        """Returns the results for a client's parts. Raises asyncio.QueueFull without room."""
        self.check_room(client, sum(len(part.ids) for part in parts))

        results: list[asyncio.Future[NBest]] = []
        lanes: set[_Lane] = set()
        for part in parts:
            lane = self._lane(text_decoder.spec, part)
            results.append(lane.put(client, part, text_decoder))
            lanes.add(lane)

        try:
            return await asyncio.gather(*results)
        finally:
            # If a batch failed or the client hung up, the other results are not needed.
            for result in results:
                result.cancel()
            for lane in lanes:
                lane.queue.drop_answered()

    def _lane(self, spec: DecoderSpec, part: Part) -> "_Lane":
        if spec.num_partitions > 1:  # Programs that exchange data must run one after another.
            return self._long

        # The shorter half of the lengths counts as short.
        short_lengths = spec.input_lengths[: len(spec.input_lengths) // 2]
        return self._short if part.row_length in short_lengths else self._long


class _Lane:
    """Waiting rows, and a thread that decodes them, one batch at a time."""

    def __init__(self, wait_secs: float, observe: Callable[[list[Part]], None]) -> None:
        self.queue = FairQueue()
        self._wait_secs = wait_secs
        self._observe = observe
        self._has_rows = asyncio.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    def put(self, client: str, part: Part, text_decoder: TextDecoder) -> asyncio.Future[NBest]:
        """Adds a part to the queue; returns the future of its results."""
        result: asyncio.Future[NBest] = asyncio.get_running_loop().create_future()
        self.queue.put(client, part, text_decoder, result)
        self._has_rows.set()
        return result

    async def work(self) -> None:
        """Decodes the rows of the queue until the task is cancelled."""
        while True:
            await self._has_rows.wait()
            # Other clients get a moment to fill the batch.
            first = next(iter(self.queue), None)
            if first is not None and len(self.queue) < first.text_decoder.num_rows:
                await asyncio.sleep(self._wait_secs)

            if len(self.queue) == 0:  # All rows were cancelled.
                self._has_rows.clear()
                continue

            # Rows that arrive meanwhile get their turns from the clock before this batch.
            batch = self.queue.take()
            await self._decode(batch)
            self.queue.advance(batch)

    async def _decode(self, batch: Batch) -> None:
        """Sets the results of a batch's rows."""
        parts = [row.part for row in batch.rows]
        decode_parts = batch.rows[0].text_decoder.decode_parts
        loop = asyncio.get_running_loop()

        try:
            results = await loop.run_in_executor(self._thread, decode_parts, parts)
            self._observe(parts)
            for row, result in zip(batch.rows, results, strict=True):
                if not row.result.done():
                    row.result.set_result(result)
        except Exception as error:  # Reported to each request; the next batch may succeed.
            for row in batch.rows:
                if not row.result.done():
                    row.result.set_exception(error)
        finally:
            # For the case that the batcher is closed meanwhile. Finished results stay.
            for row in batch.rows:
                row.result.cancel()
