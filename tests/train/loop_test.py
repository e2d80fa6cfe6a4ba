"""The feed's order, its end and its thread, and the sizes of a batch that processes share."""

import contextlib
import threading

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd.specs import Share
from lingvo_gshard.train import loop
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


class _Program:
    """Stands in for the train program of a number of steps."""

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def place(self, name, tree):
        assert name == "batches" and len(tree.x) == self.num_steps
        return tree


def test_groups_are_stacked_in_order_with_their_states():
    groups = list(loop.groups(_Numbers(7), iter([3, 3, 3, 3]), _Program))
    assert [group.batches.x[:, 0].tolist() for group in groups] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [group.input_state["given"] for group in groups] == [3, 6, 7]
    assert [group.num_steps for group in groups] == [3, 3, 1]
    assert [group.executable.num_steps for group in groups] == [3, 3, 1]


def test_it_reads_no_more_batches_than_the_sizes_add_up_to():
    source = _Numbers(100)
    assert len(list(loop.groups(source, iter([2, 3]), _Program))) == 2
    assert source.given == 5


def test_closing_ends_the_thread_which_reads_at_most_two_groups_ahead():
    source = _Numbers(10**9)
    with contextlib.closing(loop.groups(source, iter(lambda: 2, None), _Program)) as groups:
        for _ in zip(range(3), groups, strict=False):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed")]
    assert source.given <= 2 * (3 + 1 + 2)


def test_an_error_of_placing_is_raised_to_the_caller():
    def program(num_steps):
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        list(loop.groups(_Numbers(5), iter([1]), program))


def test_the_rows_of_all_processes_count_along_their_dim_alone():
    batch = NestedMap(bias=np.zeros((2, 3)), x=np.zeros((2, 5)))
    input_specs = NestedMap(
        bias=TensorSpec((2, 3), "float32", "VM"), x=TensorSpec((9, 9), "int32", "BL")
    )
    got = loop.batch_spec_of(batch, input_specs, Share(1, 4))
    assert got.bias == TensorSpec((2, 3), "float32", "VM")
    assert got.x == TensorSpec((8, 5), "int32", "BL")
