"""The share of a process, which is the same for endless batches and for one pass."""

import dataclasses

import pytest

from lingvo_gshard.input.one_pass import OnePassBatches
from lingvo_gshard.input.packing import Rows
from lingvo_gshard.input.training_rows import TrainingBatches
from tests.input import listed

_LENGTHS = [(2, 2)] * 4000  # More examples than the pools of all lanes draw.


@pytest.mark.parametrize("batches", [TrainingBatches, OnePassBatches])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_each_process_makes_an_equal_part_of_every_batch(batches, num_processes):
    parts = []
    for index in range(num_processes):
        batching = listed.batching(
            _LENGTHS, (4, 4), index, num_processes, batch_size=4, rows=Rows.SINGLE
        )
        parts.append(listed.examples_of(batches(batching)[0]))
    assert [len(part) for part in parts] == [4 // num_processes] * num_processes

    # No example is in two processes' parts.
    examples = []
    for part in parts:
        for row in part:
            examples += row
    assert len(set(examples)) == len(examples) == 4


def test_a_batching_cannot_be_changed():
    batching = listed.batching(_LENGTHS, (4, 4), batch_size=4)
    assert (batching.process_index, batching.num_processes) == (0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batching.process_index = 1
