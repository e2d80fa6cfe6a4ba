import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_gshard.input import packing
from lingvo_gshard.input.example_codec import BOS_ID, Example


def _example(source, target):
    return Example(np.array(source, np.int32), np.array(target, np.int32))


def test_the_example_of_the_docstring():
    shape = packing.RowShape(8, 8)
    pairs = [_example([5, 6, 2], [8, 2]), _example([7, 2], [9, 4, 2])]
    batch = packing.fill([pairs], shape)
    arrays = batch.features | batch.labels
    expected = {
        "source_ids": [5, 6, 2, 7, 2, 0, 0, 0],
        "source_segment_ids": [1, 1, 1, 2, 2, 0, 0, 0],
        "source_positions": [0, 1, 2, 0, 1, 0, 0, 0],
        "target_ids": [1, 8, 1, 9, 4, 0, 0, 0],
        "target_segment_ids": [1, 1, 2, 2, 2, 0, 0, 0],
        "target_positions": [0, 1, 0, 1, 2, 0, 0, 0],
        "target_labels": [8, 2, 9, 4, 2, 0, 0, 0],
        "target_weights": [1, 1, 1, 1, 1, 0, 0, 0],
    }
    assert {name: array[0].tolist() for name, array in arrays.items()} == expected
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    assert dtypes.pop("target_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


def test_rows_by_hand():
    shape = packing.RowShape(10, 6)
    lengths = np.array([(3, 1), (9, 2), (1, 6), (6, 2), (1, 1), (4, 4)])
    # Shares of a row, in 60ths: (18, 10), (54, 20), (6, 60), (36, 20), (6, 10), (24, 40).
    # Pair 1, the largest with 74, leaves room only for pair 4. Pair 2, with 66, leaves no room on
    # the target side. Pair 5, with 64, is filled up by pair 3, while pair 0 would have left 18.
    # Pair 0 is last.
    assert packing.plan_rows(lengths, shape) == [[1, 4], [2], [3, 5], [0]]


def test_rows_fill_up_evenly_on_both_sides():
    shape = packing.RowShape(20, 20)
    lengths = np.array([(10, 10), (9, 2), (2, 9), (7, 7), (2, 2)])
    # After pair 0, pair 3 leaves (3, 3); pairs 1 and 2 would leave (1, 8) and (8, 1).
    assert packing.plan_rows(lengths, shape) == [[0, 3, 4], [1, 2]]


def test_rows_are_limited_to_a_number_of_first_pairs():
    shape = packing.RowShape(10, 10)
    lengths = np.array([(6, 5), (6, 5), (4, 5), (4, 5), (1, 1)])
    assert packing.plan_at_most(lengths, shape, 2) == [[0, 2], [1, 3]]
    assert packing.plan_at_most(lengths[[0, 1, 1, 2]], shape, 2) == [[0], [1]]
    assert packing.plan_at_most(lengths, shape, 9) == [[0, 2], [1, 3], [4]]


_LENGTHS = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 9)), max_size=40)


@hypothesis.given(_LENGTHS)
@hypothesis.settings(max_examples=100, deadline=None)
def test_filled_rows_hold_every_pair_once_with_its_segment_and_positions(lengths):
    shape = packing.RowShape(13, 9)
    # All tokens differ, so that a swap would show.
    pairs, token = [], 10
    for num_source, num_target in lengths:
        pairs.append(
            _example(
                range(token, token + num_source),
                range(token + num_source, token + num_source + num_target),
            )
        )
        token += num_source + num_target
    rows = packing.plan_rows(packing.lengths_of(pairs), shape)
    assert sorted(index for row in rows for index in row) == list(range(len(pairs)))
    batch = packing.fill([[pairs[i] for i in row] for row in rows], shape)
    features, labels = batch.features, batch.labels
    seen = []
    for row in range(len(rows)):
        for side, ids in (("source", features.source_ids), ("target", labels.target_labels)):
            segments = features[f"{side}_segment_ids"][row]
            positions = features[f"{side}_positions"][row]
            expected_segment, expected_position = 0, 0
            for column, segment in enumerate(segments):
                if segment == 0:
                    assert not segments[column:].any()
                    assert ids[row, column] == positions[column] == 0
                    continue
                if segment != expected_segment:
                    assert segment == expected_segment + 1
                    expected_segment, expected_position = segment, 0
                assert positions[column] == expected_position
                expected_position += 1
            assert expected_segment == len(rows[row])
        for segment, index in enumerate(rows[row], start=1):
            source = features.source_ids[row][features.source_segment_ids[row] == segment]
            in_target = features.target_segment_ids[row] == segment
            target = labels.target_labels[row][in_target]
            assert source.tolist() == pairs[index].source_ids.tolist()
            assert target.tolist() == pairs[index].target_ids.tolist()
            shifted = [BOS_ID, *target[:-1].tolist()]
            assert features.target_ids[row][in_target].tolist() == shifted
            seen.append(index)
        is_token = features.target_segment_ids[row] > 0
        np.testing.assert_array_equal(labels.target_weights[row], is_token.astype(np.float32))
        assert not features.target_ids[row][~is_token].any()
    assert sorted(seen) == list(range(len(pairs)))


def test_truncation_keeps_eos():
    shape = packing.RowShape(3, 4)
    pair = _example([7, 8, 9, 10, 2], [5, 6, 7, 2])
    assert not shape.fits(pair)
    cut = shape.truncate(pair)
    assert cut.source_ids.tolist() == [7, 8, 2]
    assert cut.target_ids.tolist() == [5, 6, 7, 2]
    assert cut.source_ids.dtype == np.int32
    assert shape.fits(cut)


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match=r"source_len 0, target_len 7: expected at least 1"):
        packing.RowShape(0, 7)
