import numpy as np
import pytest

from lingvo_gshard.input import sentences
from lingvo_gshard.input.tokenizer import load_pair


@pytest.fixture(scope="module")
def tokenizer(data_dir):
    return load_pair(data_dir)[0]


def _dev(data_dir, language):
    return sentences.eval_text(f"{data_dir}/text/dev/{language}-en.tsv.gz")


def test_eval_text_yields_the_raw_text_in_order(data_dir):
    pairs = list(_dev(data_dir, "cy"))
    assert [source.split()[-1] for source, _ in pairs] == [str(i) for i in range(7)]
    assert all(s.startswith("cy ") and t.startswith("dev ") for s, t in pairs)


def test_every_line_appears_once_in_the_shortest_bucket(data_dir, tokenizer):
    lines = [source for source, _ in _dev(data_dir, "aa")] + ["", "ba"]
    batches = list(sentences.decode_batches(lines, tokenizer, 5, (8, 16, 40)))
    rows = {}
    for batch in batches:
        features = batch.features
        length = features.source_ids.shape[1]
        assert length in (8, 16, 40)
        assert features.source_ids.shape == (5, length)
        assert {array.dtype for array in features.Flatten()} == {np.dtype("int32")}
        for row, index in enumerate(batch.line_indices):
            size = int(features.source_segment_ids[row].sum())
            if index == -1:
                assert not any(array[row].any() for array in features.Flatten())
                continue
            assert index not in rows
            rows[index] = features.source_ids[row, :size].tolist()
            # The line does not fit any shorter bucket.
            assert size <= length
            assert size > {8: 0, 16: 8, 40: 16}[length]
            assert features.source_positions[row, :size].tolist() == list(range(size))
            assert not features.source_ids[row, size:].any()
    assert rows == {index: tokenizer.encode(line) for index, line in enumerate(lines)}
    lengths = [batch.features.source_ids.shape[1] for batch in batches]
    assert lengths == sorted(lengths)


def test_long_lines_are_truncated_and_keep_eos(tokenizer):
    (batch,) = sentences.decode_batches(["ba ke li mo nu tra ste kon wor"], tokenizer, 2, [6])
    assert batch.features.source_ids.shape == (2, 6)
    ids = tokenizer.encode("ba ke li mo nu tra ste kon wor")
    assert batch.features.source_ids[0].tolist() == [*ids[:5], 2]
    assert batch.line_indices.tolist() == [0, -1]


def test_no_lines_give_no_batches(tokenizer):
    assert list(sentences.decode_batches([], tokenizer, 4, [16])) == []


def test_batches_without_lines_fill_up_the_numbers_that_are_asked_for(tokenizer):
    found = sentences.decode_batches(["ba"] * 3, tokenizer, 2, [4, 8], lambda own: [3, own[1] + 1])
    shapes, rows = zip(*((b.features.source_ids.shape, b.line_indices) for b in found), strict=True)
    assert shapes == ((2, 4), (2, 4), (2, 4), (2, 8))
    assert [row.tolist() for row in rows] == [[0, 1], [2, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("sizes", [(0, (8, 16)), (4, (0,)), (4, (0, 8))])
def test_impossible_sizes_are_refused(tokenizer, sizes):
    with pytest.raises(ValueError, match=r"expected at least 1"):
        list(sentences.decode_batches(["ba"], tokenizer, *sizes))
