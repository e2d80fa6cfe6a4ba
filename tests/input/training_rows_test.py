"""By hand, with pools of two rows: three draws fill a pool, including the spare ones."""

import pytest

from lingvo_gshard.input import training_rows
from lingvo_gshard.input.packing import Rows
from lingvo_gshard.input.training_rows import TrainingBatches
from tests.input import listed


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(training_rows, "_MIN_POOL_ROWS", 2)


def _examples(count, *args, **kwargs):
    source = TrainingBatches(listed.batching(*args, **kwargs))
    return [listed.examples_of(source[index]) for index in range(count)]


_TEN = [(2, 2)] * 10


def test_one_lane_by_hand():
    # Pools draw 0 1 2, 3 4 5, 6 7 8, 9 0 1; the third example of each does not fit.
    found = _examples(8, _TEN, (4, 4), batch_size=1, rows=Rows.SINGLE)
    assert found == [[[0]], [[1]], [[3]], [[4]], [[6]], [[7]], [[9]], [[0]]]


def test_lanes_begin_their_pools_in_turn():
    # Pools 0 and 2 are the first lane's. The second lane is one batch ahead, in pools 1 and 3.
    found = _examples(4, _TEN, (4, 4), batch_size=2, rows=Rows.SINGLE)
    assert found == [[[0], [4]], [[1], [9]], [[6], [0]], [[7], [5]]]


def test_each_process_has_its_lanes():
    both = [
        _examples(3, _TEN, (4, 4), index, 2, batch_size=2, rows=Rows.SINGLE) for index in (0, 1)
    ]
    assert both == [[[[0]], [[1]], [[6]]], [[[4]], [[9]], [[0]]]]


def test_packed_rows_are_full():
    # A row has room for two of these examples, so a pool of two rows draws five.
    found = _examples(2, _TEN, (4, 4), batch_size=1, rows=Rows.PACKED)
    assert found == [[[0, 1]], [[2, 3]]]


def test_examples_that_are_too_long_are_left_out():
    lengths = [(2, 2), (5, 2), (2, 2), (2, 5)] * 2
    found = _examples(4, lengths, (4, 4), batch_size=1, rows=Rows.SINGLE)
    # Half of the examples fit, so a pool draws five: 0 to 4, then 5 to 9.
    assert found == [[[0]], [[2]], [[6]], [[0]]]


def test_rows_that_nothing_fits_are_refused():
    with pytest.raises(ValueError, match=r"none of 2000 examples fit RowShape\(source_len=1, "):
        TrainingBatches(listed.batching(_TEN, (1, 4), batch_size=1, rows=Rows.SINGLE))
