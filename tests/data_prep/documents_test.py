import gzip

import pyarrow
import pytest
from pyarrow import parquet

from data_prep import tsv
from data_prep.documents import JsonlDocuments, OneSide, ParquetDocuments, TextFile
from data_prep.rules import Rule
from data_prep.sources import ColumnsFile, MosesFiles, Row
from data_prep.tsv import Document, Malformed

_TEXT = "\ufeffone  line\nanother\t one\n\n \nthe third\r\n"


def test_a_document_is_a_line_or_a_block_of_lines(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text(_TEXT, newline="")
    rows = list(TextFile(path, "notes", "line").rows())
    assert [row.language for row in rows] == ["notes"] * 5
    one, other, third = map(Document, ("one line", "another one", "the third"))
    assert [row.example for row in rows] == [one, other, Rule.EMPTY, Rule.EMPTY, third]
    blocks = [row.example for row in TextFile(path, "notes", "block").rows()]
    assert blocks == [Document("one line another one"), Document("the third")]


def test_a_block_with_a_malformed_line_is_malformed(tmp_path):
    with gzip.open(tmp_path / "x.txt.gz", "wb") as file:
        file.write(b"good\n\nbad \xff line\nof a block\n\ngood too\n")
    source = TextFile(tmp_path / "x.txt.gz", "notes", "block")
    good, bad, other = [row.example for row in source.rows()]
    assert (good, other) == (Document("good"), Document("good too"))
    assert bad == Malformed("not UTF-8: invalid start byte at byte 4")


def test_lines_are_read_by_spans_and_blocks_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    path.write_text("".join(f"document {i}\n\n" for i in range(40)))
    monkeypatch.setattr(tsv, "BYTES_PER_SPAN", 100)
    lines = TextFile(path, "notes", "line")
    assert len(lines.spans()) > 3
    rows = [row for span in lines.spans() for row in lines.rows(span)]
    assert rows == list(lines.rows())
    assert len(rows) == 80
    assert TextFile(path, "notes", "block").spans() == [tsv.WHOLE]


def test_a_field_of_json(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = ['{"page": {"text": "first\\n\\nsecond"}}', '{"page": {}}', '{"page": null}', "{}"]
    path.write_text("\n".join([*lines, '{"page": 3}', "[]", "{"]))
    source = JsonlDocuments(path, "web", "page.text")
    source.check()
    found = [row.example for row in source.rows()]
    malformed = Malformed("field 'page.text' is not text")
    assert found[:4] == [Document("first second"), *[Document("")] * 3]
    assert found[4:6] == [malformed, malformed]
    assert found[6].startswith("not JSON: ")


def test_a_column_of_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    records = [{"page": {"text": "first\nsecond"}, "id": 1}, {"page": {"text": None}, "id": 2}]
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    first, second = ParquetDocuments(path, "web", "page.text").rows()
    assert first == Row("web", Document("first second"))
    assert second == Row("web", Document(""))  # Null counts as empty text, not as damage.
    with pytest.raises(ValueError, match=r"x.parquet has no column text, only id, page.text"):
        list(ParquetDocuments(path, "web", "text").rows())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="x.parquet is not a whole Parquet file") as error:
        ParquetDocuments(path, "web", "page.text").spans()
    assert "\n" not in str(error.value)


def test_one_side_of_pairs(tmp_path):
    (tmp_path / "x.de").write_text("ein Haus\nkein\xdf\n", encoding="latin-1")
    (tmp_path / "x.en").write_text("a house\nno\n")
    pairs = MosesFiles(tmp_path / "x.de", tmp_path / "x.en", "de", "dev")
    english, malformed = OneSide(pairs, "english", None, pairs.split).rows()
    assert english == Row("en", Document("a house"))
    assert isinstance(malformed.example, Malformed)
    source = OneSide(pairs, "source", None, pairs.split)
    assert next(source.rows()) == Row("de", Document("ein Haus"))
    assert (source.split, source.files) == ("dev", pairs.files)
    assert next(OneSide(pairs, "source", "talks", "dev").rows()).language == "talks"


def test_a_pair_with_a_low_score_is_dropped(tmp_path):
    (tmp_path / "x.tsv").write_text("0.1\tein\tone\n0.9\tzwei\ttwo\n")
    pairs = ColumnsFile(tmp_path / "x.tsv", "de", 1, 2, score_column=0, min_score=0.5)
    found = [row.example for row in OneSide(pairs, "english", None, None).rows()]
    assert found == [Rule.LOW_SCORE, Document("two")]
