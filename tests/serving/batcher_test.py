"""Batches of several requests, cancelled requests, and a full queue."""

import asyncio
import contextlib
import dataclasses
import time

import pytest

from lingvo_gshard.decoding.text_decoder import Hypothesis
from lingvo_gshard.serving.batcher import Batcher, Limits, ShareFull
from tests.serving.shouter import SPEC, Shouter, part, text_of


@contextlib.asynccontextmanager
async def _batcher(translator, **limits):
    """Yields a function that submits a client's lines."""
    async with Batcher(Limits(**limits)) as batcher:

        def submit(lines, client="one", row_length=16):
            return batcher.submit(client, translator, [part(line, row_length) for line in lines])

        yield submit


class _Recorder(Shouter):
    """Also records the lines of each batch."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def decode_parts(self, parts):
        self.lines.append(" ".join(map(text_of, parts)))
        return super().decode_parts(parts)


def test_a_large_request_is_translated_in_several_batches_in_order():
    translator = Shouter()

    async def run():
        async with _batcher(translator) as submit:
            lines = [[f"{n} {i}" for i in range(n)] for n in (3, 9, 1, 2)]
            found = await asyncio.gather(*(submit(each) for each in lines))
            assert [[best.text for best, _ in each] for each in found] == lines

    asyncio.run(run())
    assert translator.batches == [4, 4, 4, 3]


@pytest.mark.parametrize(("num_partitions", "first"), [(1, ["short"]), (2, ["long"] * 2)])
def test_a_short_line_does_not_wait_for_a_long_one(num_partitions, first):
    """Except on several devices, whose programs must not run side by side."""
    answered = []

    class Translator(_Recorder):
        num_rows = 1

        def decode_parts(self, parts):
            time.sleep(0.5 if parts[0].row_length > 16 else 0.0)
            return [(Hypothesis(text_of(part), 0.0, 1),) for part in parts]

    translator = Translator()
    spec = dataclasses.replace(SPEC, input_lengths=(16, 32), num_partitions=num_partitions)
    translator.spec = spec

    async def run():
        async with _batcher(translator) as submit:

            async def send(line, row_length):
                await submit([line], "one", row_length)
                answered.append(line)

            long_ones = [asyncio.create_task(send("long", 32)) for _ in range(2)]
            await asyncio.sleep(0.05)
            await asyncio.gather(send("short", 16), *long_ones)

    asyncio.run(run())
    assert answered[: len(first)] == first and len(answered) == 3


def test_cancelled_requests_are_not_translated():
    """Neither waiting requests, nor the rest of a request that is being translated."""
    translator = Shouter(secs=0.05)

    async def run():
        async with _batcher(translator) as submit:
            waiting = asyncio.create_task(submit(["a", "b"]))
            await asyncio.sleep(0)
            waiting.cancel()
            begun = asyncio.create_task(submit(["a"] * 50))
            while not translator.batches:
                await asyncio.sleep(0.01)
            begun.cancel()
            return await submit(["c"])

    assert asyncio.run(run())[0][0].text == "C" and translator.batches == [4, 1]


def test_cancelled_requests_take_no_room():
    async def run():
        async with _batcher(Shouter(), client_tokens=8) as submit:
            cancelled = asyncio.create_task(submit(["a"] * 4))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.sleep(0)
            return len(await submit(["b"] * 4))

    assert asyncio.run(run()) == 4


def test_closing_cancels_waiting_requests():
    async def run():
        async with _batcher(Shouter(secs=0.2)) as submit:
            waiting = [asyncio.create_task(submit(["a"] * 4)) for _ in range(3)]
            await asyncio.sleep(0.05)
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert all(isinstance(one, asyncio.CancelledError) for one in asyncio.run(run()))


def test_a_full_queue_or_share_refuses():
    async def run():
        async with _batcher(Shouter(), client_tokens=9, queued_tokens=12) as submit:
            first = asyncio.create_task(submit(["a"] * 4))
            await asyncio.sleep(0)
            with pytest.raises(ShareFull, match="8 of your tokens wait; the limit is 9"):
                await submit(["b"])
            with pytest.raises(asyncio.QueueFull, match="8 tokens wait; the limit is 12"):
                await submit(["b"] * 3, "two")
            return len(await first), await submit([])

    assert asyncio.run(run()) == (4, [])
