import numpy as np
import pytest

from lingvo_gshard.input import sentences
from lingvo_gshard.input.tokenizer import load_pair


def _encoded(data_dir, lines):
    tokenizer, _ = load_pair(data_dir)
    return [np.array(ids, np.int32) for ids in tokenizer.encode_lines(lines)]


def _dev(data_dir, language):
    return sentences.eval_text(f"{data_dir}/text/dev/{language}-en.tsv.gz")


def test_eval_text_yields_the_raw_text_in_order(data_dir):
    pairs = list(_dev(data_dir, "cy"))
    assert [source.split()[-1] for source, _ in pairs] == [str(i) for i in range(7)]
    assert all(s.startswith("cy ") and t.startswith("dev ") for s, t in pairs)


def test_every_line_appears_once_in_the_shortest_bucket(data_dir):
    lines = _encoded(data_dir, [source for source, _ in _dev(data_dir, "aa")] + ["", "ba"])
    batches = list(sentences.decode_batches(lines, 5, (8, 16, 40)))
    rows = {}
    for batch in batches:
        features = batch.features
        length = features.source_ids.shape[1]
        assert length in (8, 16, 40)
        assert features.source_ids.shape == (5, length)
        assert {array.dtype for array in features.Flatten()} == {np.dtype("int32")}
        assert not any(array[len(batch.indices) :].any() for array in features.Flatten())
        for row, index in enumerate(batch.indices):
            size = int(features.source_segment_ids[row].sum())
            assert index not in rows
            rows[index] = features.source_ids[row, :size].tolist()
            # The line does not fit any shorter bucket.
            assert size <= length
            assert size > {8: 0, 16: 8, 40: 16}[length]
            assert features.source_positions[row, :size].tolist() == list(range(size))
            assert not features.source_ids[row, size:].any()
    assert rows == {index: ids.tolist() for index, ids in enumerate(lines)}
    lengths = [batch.features.source_ids.shape[1] for batch in batches]
    assert lengths == sorted(lengths)


def test_no_lines_give_no_batches():
    assert list(sentences.decode_batches([], 4, [16])) == []


def test_batches_without_lines_fill_up_the_numbers_that_are_asked_for():
    lines = [np.array([5, 2], np.int32)] * 3
    found = sentences.decode_batches(lines, 2, [4, 8], lambda own: [3, own[1] + 1])
    shapes, indices = zip(*((b.features.source_ids.shape, b.indices) for b in found), strict=True)
    assert shapes == ((2, 4), (2, 4), (2, 4), (2, 8))
    assert list(indices) == [[0, 1], [2], [], []]


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match=r"max_source_len must be 1 or more, got 0"):
        sentences.lengths(0)
