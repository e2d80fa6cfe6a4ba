"""The feed's order, its end, and its thread."""

import threading

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.feed import Feed
from lingvo_gshard.train.loop import group_sizes


class _Numbers:
    specs = NestedMap()

    def __init__(self, stop):
        self.given, self._stop = 0, stop

    def __iter__(self):
        while self.given < self._stop:
            self.given += 1
            yield NestedMap(x=np.full(3, self.given))

    def get_state(self):
        return {"given": self.given}

    def set_state(self, state):
        self.given = state["given"]


def test_group_sizes_end_at_max_steps():
    assert list(group_sizes(3, 13, 4)) == [4, 4, 2]
    assert list(group_sizes(5, 5, 4)) == []
    unbounded = group_sizes(3, None, 4)
    assert [next(unbounded) for _ in range(3)] == [4, 4, 4]


def test_groups_are_stacked_in_order_with_their_states():
    placed = []

    def place(batches, num_steps):
        placed.append(num_steps)
        return batches

    with Feed(_Numbers(7), iter([3, 3, 3, 3]), place) as feed:
        groups = list(feed)
    assert [group.batches.x[:, 0].tolist() for group in groups] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [group.input_state["given"] for group in groups] == [3, 6, 7]
    assert [group.num_steps for group in groups] == placed == [3, 3, 1]


def test_it_reads_no_batch_more_than_the_sizes_say():
    source = _Numbers(100)
    with Feed(source, iter([2, 3]), lambda batches, _: batches) as feed:
        assert len(list(feed)) == 2
    assert source.given == 5


def test_leaving_ends_the_thread_and_reads_at_most_two_groups_ahead():
    source = _Numbers(10**9)
    with Feed(source, iter(lambda: 2, None), lambda batches, _: batches) as feed:
        for _ in zip(range(3), feed, strict=False):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "feed"]
    assert source.given <= 2 * (3 + 1 + 2)


def test_an_error_of_placing_is_raised_to_the_caller():
    def place(batches, num_steps):
        raise ValueError("no room")

    with (
        pytest.raises(ValueError, match="no room"),
        Feed(_Numbers(5), iter([1]), place) as feed,
    ):
        list(feed)
