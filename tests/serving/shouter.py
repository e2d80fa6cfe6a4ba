"""A translator that shouts, and a server for it with a client, for the tests of this folder."""

import asyncio
import threading
import time

import numpy as np
from aiohttp.test_utils import TestClient, TestServer

from lingvo_gshard.decoding.bundle_spec import DecoderSpec
from lingvo_gshard.decoding.text_decoder import Attention, Hypothesis, Part, Token
from lingvo_gshard.decoding.translator import Translator
from lingvo_gshard.serving.app import Server

SPEC = DecoderSpec("toy", ("de", "fr"), 4, (16,), 2, 1)


def part(line, row_length=16):
    """One token for each letter, and one for the end."""
    return Part(np.array([*map(ord, line), 0]), row_length)


def text_of(part):
    """The line of a part."""
    return "".join(map(chr, part.ids[:-1]))


class Shouter(Translator):
    """Translates lines to upper case, with `?` as the second-best result; records batch sizes.

    The line `nan` is left without a result.
    """

    num_rows = 4

    def __init__(self, secs=0.0, spec=SPEC):
        self.secs, self.batches, self.spec = secs, [], spec
        self._busy = threading.Lock()

    def num_tokens(self, lines):
        return [len(line) + 1 for line in lines]

    @property
    def decoder(self):
        return self

    def compile(self):
        time.sleep(self.secs)

    def parts(self, line, number=1, seed=0):
        return [part(line)]

    def text_of(self, line, ids):
        """The text of some of a result's tokens."""
        return "".join(map(chr, ids))

    def chat(self, messages):
        """The text of a chat, of which only users take part."""
        if any(message["role"] != "user" for message in messages):
            raise ValueError("the chat template fails: only users")
        return "|".join(message["content"] for message in messages)

    @property
    def of_chats(self):
        return self

    def decode_parts(self, parts):
        return list(self._translate(parts))

    def _translate(self, parts):
        assert self._busy.acquire(blocking=False), "two batches at once"
        lines = list(map(text_of, parts))
        assert len(lines) <= self.num_rows
        if "raise" in lines:
            self._busy.release()
            raise RuntimeError("the device is gone")
        self.batches.append(len(lines))
        time.sleep(self.secs)
        self._busy.release()
        drawn = Attention(("a",), ("A",), ((1.0,),))
        for line in lines:
            if line == "nan":
                yield ()
                continue
            tokens = (Token(65, "A", -0.75), Token(2, "</s>", -0.25))
            yield (
                Hypothesis(line.upper(), -0.5, 2, drawn, tokens=tokens),
                Hypothesis("?", -2.0, 1),
            )


def with_client(act, translator=None, limits=None, **options):
    """Runs `act(client)` against a server on a local port."""

    async def run():
        server = Server(translator or Shouter(), limits, **options)
        async with TestClient(TestServer(server.app())) as client:
            return await act(client)

    return asyncio.run(run())


async def post(client, body, status=200, path="/translate"):
    async with client.post(path, json=body) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()
