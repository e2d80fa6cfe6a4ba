import gzip

import pytest

from data_prep.sources.line_files import JsonlFile, MosesFiles, TsvFile
from data_prep.sources.source import BadRow, Row
from data_prep.tsv import Pair


def test_tsv(tmp_path):
    (tmp_path / "x.tsv").write_text("ein Haus\ta house\nno tab\n")
    assert list(TsvFile(tmp_path / "x.tsv", "de").rows()) == [
        Row("de", Pair("ein Haus", "a house")),
        BadRow("de", 2, "expected 1 tab, given 0"),
    ]


def test_moses(tmp_path):
    (tmp_path / "x.de").write_bytes(b"ein\tHaus\n\n\xff\nzwei\n")
    (tmp_path / "x.en.gz").write_bytes(gzip.compress(b"a house\nnothing\nthree\ntwo"))
    source = MosesFiles(tmp_path / "x.de", tmp_path / "x.en.gz", "de", "train")
    assert list(source.rows()) == [
        Row("de", Pair("ein Haus", "a house")),
        Row("de", Pair("", "nothing")),
        BadRow("de", 3, "not UTF-8: invalid start byte at byte 0"),
        Row("de", Pair("zwei", "two")),
    ]
    assert source.files == (tmp_path / "x.de", tmp_path / "x.en.gz")


def test_moses_files_of_different_length_are_refused(tmp_path):
    (tmp_path / "x.de").write_text("eins\nzwei\n")
    (tmp_path / "x.en").write_text("one\ntwo\nthree\n")
    with pytest.raises(ValueError, match=r"differ in their number of lines: x.de ends after 2"):
        list(MosesFiles(tmp_path / "x.de", tmp_path / "x.en", "de").rows())


def test_jsonl(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        '{"translation": {"de": "ein\\nHaus", "en": "a house"}, "id": 3}\n'
        '{"translation": {"de": "ein Hund"}}\n'
        "{\n"
        '{"translation": {"de": "eins", "en": 1}}\n'
    )
    source = JsonlFile(tmp_path / "x.jsonl", "de", "translation.de", "translation.en")
    rows = list(source.rows())
    assert rows[0] == Row("de", Pair("ein Haus", "a house"))
    assert [(row.number, row.reason[:28]) for row in rows[1:]] == [
        (2, "no text in field 'translatio"),
        (3, "not JSON: Expecting property"),
        (4, "no text in field 'translatio"),
    ]
