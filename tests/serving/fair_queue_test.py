"""The order in which rows are served, and the virtual clock."""

import concurrent.futures
import types

import numpy as np

from lingvo_gshard.decoding.text_decoder import Part
from lingvo_gshard.serving.fair_queue import FairQueue

_TRANSLATOR = types.SimpleNamespace(num_rows=2)


def _put(queue, client, *token_counts, row_length=16, translator=_TRANSLATOR):
    """Adds rows with this many tokens; returns their results."""
    results = [concurrent.futures.Future() for _ in token_counts]
    for count, result in zip(token_counts, results, strict=True):
        queue.put(client, Part(np.zeros(count, np.int32), row_length), translator, result)
    return results


def _served(queue):
    """Empties the queue; returns the clients of each batch's rows."""
    batches = []
    while len(queue):
        batch = queue.take()
        queue.advance(batch)
        batches.append(" ".join(row.client for row in batch.rows))
    return batches


def test_clients_have_equal_shares_of_the_tokens():
    """The example in the module's docstring."""
    queue = FairQueue()
    _put(queue, "x", 3, 3, 3, 3)
    _put(queue, "y", 1, 1, 1)
    assert [row.turn for row in queue] == [0, 3, 6, 9, 0, 1, 2]
    assert _served(queue) == ["x y", "y y", "x x", "x"]


def test_a_new_client_is_in_the_next_batch():
    queue = FairQueue()
    _put(queue, "x", *[3] * 9)
    for _ in range(3):
        queue.advance(queue.take())
    _put(queue, "new", 5)
    assert _served(queue)[0] == "x new"


def test_a_quiet_client_saves_up_no_turns():
    queue = FairQueue()
    _put(queue, "quiet", 1)
    _put(queue, "x", *[1] * 8)
    for _ in range(4):
        queue.advance(queue.take())
    _put(queue, "quiet", 1, 1, 1)
    _put(queue, "y", 1, 1, 1)
    assert _served(queue) == ["x quiet", "y quiet", "y quiet", "y"]


def test_the_clock_advances_by_the_share_of_each_client():
    queue = FairQueue()
    _put(queue, "x", 4, 4)
    _put(queue, "y", 2)
    batch = queue.take()
    assert (batch.tokens, batch.num_clients) == (6, 2)
    queue.advance(batch)
    _put(queue, "z", 1)
    assert [(row.client, row.turn) for row in queue] == [("x", 4.0), ("z", 3.0)]


def test_a_batch_has_one_length_and_one_translator():
    queue = FairQueue()
    other = types.SimpleNamespace(num_rows=2)
    _put(queue, "a", 1)
    _put(queue, "b", 1, row_length=32)
    _put(queue, "c", 1, translator=other)
    _put(queue, "d", 1)
    assert _served(queue) == ["a d", "b", "c"]


def test_dropped_rows_cost_nothing():
    queue = FairQueue()
    results = _put(queue, "x", 5, 5)
    results[0].cancel()
    results[1].set_result(())
    queue.drop_answered()
    _put(queue, "x", 1)
    assert [row.turn for row in queue] == [0]
