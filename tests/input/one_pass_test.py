import numpy as np
import pytest

from lingvo_gshard.input import one_pass
from lingvo_gshard.input.one_pass import OnePassBatches
from lingvo_gshard.input.packing import Rows
from tests.input import listed


def _batches(*args, **kwargs):
    """Returns all batches, after checking that their number is within its bound."""
    source = OnePassBatches(listed.batching(*args, **kwargs))
    batches = []
    while (batch := source[len(batches)]) is not None:
        batches.append(batch)
    assert source[len(batches) + 3] is None
    assert len(batches) <= len(source)

    # Planned ahead or not, the batches are counted.
    assert source.count_batches(None) == len(batches)
    limited = OnePassBatches(listed.batching(*args, **kwargs))
    assert limited.count_batches(2) == min(2, len(batches))
    assert limited.count_batches(None) == len(batches) == limited.count_batches(10**6)
    return batches


def test_one_example_a_row():
    batches = _batches([(2, 2), (3, 4), (5, 2)], (6, 4), batch_size=2, rows=Rows.SINGLE)
    assert [listed.examples_of(batch) for batch in batches] == [[[0], [1]], [[2], []]]
    assert batches[1].labels.target_weights.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]


def test_buckets_by_hand():
    lengths = [(2, 2), (5, 3), (2, 4), (3, 7), (9, 2), (2, 1)]
    batches = _batches(lengths, (8, 8), batch_size=1, rows=Rows.BUCKETED)
    # Quarters, four rows per batch; halves, two rows; then full rows, the last of which is cut.
    assert [batch.features.source_ids.shape for batch in batches] == [
        (4, 2),
        (2, 4),
        (1, 8),
        (1, 8),
        (1, 8),
    ]
    assert [listed.examples_of(batch) for batch in batches] == [
        [[0], [5], [], []],
        [[2], []],
        [[1]],
        [[3]],
        [[4]],
    ]
    assert batches[4].features.source_ids.tolist() == [[14] * 7 + [2]]


def test_lengths_that_do_not_divide_evenly_have_fewer_buckets():
    batches = _batches([(1, 1), (3, 3), (6, 6)], (6, 6), batch_size=1, rows=Rows.BUCKETED)
    assert [batch.features.source_ids.shape for batch in batches] == [(2, 3), (1, 6)]


def test_packed_rows_of_two_processes_by_hand():
    # Bundles of similar lengths: 0 with 2, 1 with 3, and 4 alone.
    lengths = [(2, 2), (6, 5), (2, 2), (6, 6), (8, 8)]
    both = [_batches(lengths, (8, 8), index, 2, batch_size=2, rows=Rows.PACKED) for index in (0, 1)]
    found = [[listed.examples_of(batch) for batch in batches] for batches in both]
    assert found == [[[[0, 1]], [[4]]], [[[2, 3]], [[]]]]


@pytest.mark.parametrize("num_processes", [1, 8, 128])
def test_bundles_of_similar_lengths_leave_little_more_padding(num_processes):
    rng = np.random.default_rng(3)
    source = rng.gamma(4.0, 6.0, 2048 * num_processes) + 2
    target = source * rng.normal(1.0, 0.15, len(source)) + 1
    lengths = np.stack([source, target], axis=1).astype(np.int64).clip(1, 128)
    bundles = one_pass._bundles(lengths, num_processes)
    np.testing.assert_array_equal(np.sort(bundles.ravel()), np.arange(len(lengths)))
    if num_processes == 1:
        np.testing.assert_array_equal(bundles[:, 0], np.arange(2048))
    longest = lengths[bundles].max(axis=1)
    assert (longest.sum(axis=0) * num_processes < 1.06 * lengths.sum(axis=0)).all()
