import gzip

import pytest

from lingvo_gshard.input import sentences


def test_eval_text_yields_the_raw_text_in_order(data_dir):
    pairs = list(sentences.eval_text(f"{data_dir}/text/dev/cy-en.tsv.gz"))
    assert [source.split()[-1] for source, _ in pairs] == [str(i) for i in range(7)]
    assert all(s.startswith("cy ") and t.startswith("dev ") for s, t in pairs)


def test_documents_end_only_at_newlines(tmp_path):
    path = tmp_path / "notes.txt.gz"
    path.write_bytes(gzip.compress("one\u2028line\n\ntwo  words\r\n".encode()))
    assert list(sentences.eval_documents(path)) == ["one\u2028line", "", "two  words\r"]


def test_row_lengths_end_with_the_longest():
    assert sentences.lengths(100, "x") == (16, 32, 64, 100)
    assert sentences.lengths(9, "x") == (9,)


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match=r"max_source_len must be 1 or more, got 0"):
        sentences.lengths(0, "decode.max_source_len")
