"""A queue that gives waiting clients equal shares of the tokens, however many rows each one sends.

This is weighted fair queueing (Demers et al., 1989), with equal weights and a virtual clock. Every
row has a turn, a time of that clock, and rows are served in the order of their turns:

- The turns of one client's rows are as far apart as each row has tokens.
- A client that has been quiet gets the clock's time as its next turn. It neither saves up turns nor
  pays for earlier ones.
- A batch of T tokens, decoded while n clients wait, advances the clock by T / n, each client's
  share of the batch.

So a new client's line is in the next batch, whatever backlog the others have. An example:
client x sends rows of 3 tokens, and then client y rows of 1 token; a batch has two rows.

    row     x1  x2  x3  x4    y1  y2  y3
    turn     0   3   6   9     0   1   2      batches: x1 y1 | y2 y3 | x2 x3 | x4
"""

import asyncio
import dataclasses
from collections.abc import Iterator

from lingvo_gshard.decoding.text_decoder import NBest, Part, TextDecoder


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A part of a client's line that waits for its results."""

    client: str
    part: Part
    text_decoder: TextDecoder
    result: asyncio.Future[NBest]
    turn: float

    @property
    def tokens(self) -> int:
        """The number of source tokens, with EOS."""
        return len(self.part.ids)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows that one run of a program decodes, and the number of clients that waited."""

    rows: list[Row]
    num_clients: int  # Including the clients of these rows.

    @property
    def tokens(self) -> int:
        """The number of source tokens of all rows."""
        return sum(row.tokens for row in self.rows)


class FairQueue:
    """The waiting rows."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._now = 0.0
        # The next turn of each client, if it is later than now.
        self._next_turns: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def put(
        self, client: str, part: Part, text_decoder: TextDecoder, result: asyncio.Future[NBest]
    ) -> None:
        """Adds a row at its client's next turn."""
        turn = max(self._now, self._next_turns.get(client, self._now))
        row = Row(client, part, text_decoder, result, turn)
        self._next_turns[client] = turn + row.tokens
        self._rows.append(row)

    def take(self) -> Batch:
        """Removes the next batch: the row with the first turn, and the next rows that match it.

        All rows of a batch have the same text decoder and length. The queue must not be empty.
        """
        num_clients = len({row.client for row in self._rows})

        # Sorting is stable, so rows with equal turns are served in the order of their arrival.
        self._rows.sort(key=lambda row: row.turn)
        first = self._rows[0]

        taken: list[Row] = []
        left: list[Row] = []
        for row in self._rows:
            has_room = len(taken) < first.text_decoder.num_rows
            is_alike = row.text_decoder is first.text_decoder
            if has_room and is_alike and row.part.row_length == first.part.row_length:
                taken.append(row)
            else:
                left.append(row)

        self._rows = left
        return Batch(taken, num_clients)

    def advance(self, batch: Batch) -> None:
        """Advances the clock by each client's share of a decoded batch."""
        self._now += batch.tokens / batch.num_clients
        # A client whose next turn has passed counts as new.
        self._next_turns = {
            client: turn for client, turn in self._next_turns.items() if turn > self._now
        }

    def drop_answered(self) -> None:
        """Removes the rows whose result is no longer awaited; they cost their clients nothing."""
        waiting: list[Row] = []
        for row in self._rows:
            if not row.result.done():
                waiting.append(row)
            elif row.client in self._next_turns:
                self._next_turns[row.client] -= row.tokens
        self._rows = waiting
