"""Dynamic batching: fills the rows of each run of a program with the parts of several clients."""

import asyncio
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Self

from lingvo_gshard.translation.bundle import DecoderSpec
from lingvo_gshard.translation.translator import NBest, Part, Translator


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most source tokens of a line, a request, a client's queue and all queues.

    A longer line or request is never translated; one that would overfill a queue may come again.
    Parts that don't fill a batch wait `wait_secs` for others.
    """

    line_tokens: int = 4096
    request_tokens: int = 16_384
    client_tokens: int = 32_768
    queued_tokens: int = 65_536
    wait_secs: float = 0.005


class ShareFull(asyncio.QueueFull):
    """A client has as many tokens in the queue as it may have."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    """A part that waits for its translations; `turn` is a virtual time."""

    client: str
    turn: float
    part: Part
    translator: Translator
    result: asyncio.Future[NBest]


class Batcher:
    """Forms batches of the parts of all clients, each of which one run of a program translates.

    Short rows and long ones wait in lanes of their own, whose batches run side by side, so that a
    line of a few words waits for no batch of long ones. A decoder of several devices has one lane.
    Leaving its context cancels the waiting requests. `observe` is called with each batch.
    """

    def __init__(
        self, limits: Limits, observe: Callable[[list[Part]], None] = lambda parts: None
    ) -> None:
        self._limits = limits
        self._short, self._long = (_Lane(limits.wait_secs, observe) for _ in range(2))

    async def __aenter__(self) -> Self:
        lanes = (self._short, self._long)
        self._workers = [asyncio.create_task(lane.work()) for lane in lanes]
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for row in self._rows():
            row.result.cancel()

    def _rows(self) -> list[_Row]:
        return [*self._short.rows, *self._long.rows]

    @property
    def queued_tokens(self) -> int:
        """The number of waiting tokens, without those in translation and of cancelled requests."""
        return sum(len(row.part.ids) for row in self._rows())

    def check_room(self, client: str, added: int) -> None:
        """Raises asyncio.QueueFull if others wait, and a client's tokens can't be queued now."""
        limits = self._limits
        own = sum(len(row.part.ids) for row in self._rows() if row.client == client)
        if own and own + added > limits.client_tokens:
            raise ShareFull(f"{own} tokens of yours wait; the limit is {limits.client_tokens}.")
        if (queued := self.queued_tokens) and queued + added > limits.queued_tokens:
            raise asyncio.QueueFull(f"{queued} tokens wait; the limit is {limits.queued_tokens}.")

    def _lane(self, spec: DecoderSpec, part: Part) -> "_Lane":
        if spec.num_partitions > 1:  # Programs that exchange data must run one after another.
            return self._long
        short = spec.source_lengths[: len(spec.source_lengths) // 2]
        return self._short if part.row_length in short else self._long

    async def submit(
        self, client: str, translator: Translator, parts: Sequence[Part]
    ) -> list[NBest]:
        """Returns a translator's results for a client's parts. Raises as `check_room`."""
        self.check_room(client, sum(len(part.ids) for part in parts))
        lanes = [self._lane(translator.spec, part) for part in parts]
        rows = [lane.put(client, translator, part) for lane, part in zip(lanes, parts, strict=True)]
        try:
            return await asyncio.gather(*(row.result for row in rows))
        finally:
            for row in rows:  # If a batch failed or the client hung up, the others are not needed.
                row.result.cancel()
            for lane in {*lanes}:
                lane.drop_cancelled()


class _Lane:
    """Rows that wait, and a thread that translates them, one batch at a time.

    Clients that wait have equal shares of the tokens (weighted fair queueing; Demers et al., 1989):
    rows are served by their turns. A client's next turn is later than its last one by the tokens of
    that, but never earlier than now; and now advances by the tokens of a batch, divided by the
    number of clients. So the line of a new client waits for the run under way alone.
    """

    def __init__(self, wait_secs: float, observe: Callable[[list[Part]], None]) -> None:
        self.rows: list[_Row] = []
        self._wait_secs, self._observe = wait_secs, observe
        self._now = 0.0
        self._turns: dict[str, float] = {}  # The next one of each client, if it is later than now.
        self._arrived = asyncio.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def put(self, client: str, translator: Translator, part: Part) -> _Row:
        """Adds a row at the client's next turn."""
        turn = max(self._now, self._turns.get(client, self._now))
        self._turns[client] = turn + len(part.ids)
        row = _Row(client, turn, part, translator, asyncio.get_running_loop().create_future())
        self.rows.append(row)
        self._arrived.set()
        return row

    def drop_cancelled(self) -> None:
        """Drops the rows that nobody waits for, with what they cost their clients."""
        for row in self.rows:
            if row.result.done() and row.client in self._turns:
                self._turns[row.client] -= len(row.part.ids)
        self.rows = [row for row in self.rows if not row.result.done()]

    async def work(self) -> None:
        """Translates all that comes, until it is cancelled."""
        while True:
            await self._arrived.wait()
            if self.rows and len(self.rows) < self.rows[0].translator.num_rows:
                await asyncio.sleep(self._wait_secs)
            if not self.rows:
                self._arrived.clear()
                continue
            clients = {row.client for row in self.rows}
            batch = self._take()
            await self._run(batch)
            self._now += sum(len(row.part.ids) for row in batch) / len(clients)
            self._turns = {name: t for name, t in self._turns.items() if t > self._now}

    def _take(self) -> list[_Row]:
        """Takes the rows of a batch, which have the length of the first one."""
        self.rows.sort(key=lambda row: row.turn)
        translator, length = self.rows[0].translator, self.rows[0].part.row_length
        same = (row for row in self.rows if row.translator is translator)
        fitting = (row for row in same if row.part.row_length == length)
        batch = list(itertools.islice(fitting, translator.num_rows))
        self.rows = list(itertools.filterfalse(set(batch).__contains__, self.rows))
        return batch

    async def _run(self, batch: list[_Row]) -> None:
        parts = [row.part for row in batch]
        try:
            translate, loop = batch[0].translator.translate_parts, asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, translate, parts)
            self._observe(parts)
            for row, translations in zip(batch, found, strict=True):
                if not row.result.done():
                    row.result.set_result(translations)
        except Exception as error:  # Reported to each request; the next batch may succeed.
            for row in batch:
                if not row.result.done():
                    row.result.set_exception(error)
        finally:
            for row in batch:
                row.result.cancel()
