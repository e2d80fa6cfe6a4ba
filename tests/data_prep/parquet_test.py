import datetime
import itertools

import pyarrow
import pytest
from pyarrow import parquet

from data_prep import tsv
from data_prep.parquet import ParquetFile
from data_prep.rules import Rule
from data_prep.sources import Row
from data_prep.tsv import Malformed, Pair

_COLUMNS = {"source_column": "translation.de", "english_column": "translation.en"}


@pytest.fixture
def path(tmp_path):
    records = [
        {"translation": {"de": f"Satz\n{i}", "en": f"sentence {i}"}, "score": i / 10, "id": i}
        for i in range(10)
    ]
    records[8]["translation"]["de"] = records[9]["score"] = None
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=3)
    return path


def test_named_columns_and_a_threshold(path):
    rows = list(ParquetFile(path, "de", **_COLUMNS).rows())
    assert rows[3] == Row("de", Pair("Satz 3", "sentence 3"))
    assert rows[8] == Row("de", Pair("", "sentence 8"))  # Null is no text, and no damage.
    assert len(rows) == 10
    scored = list(ParquetFile(path, "de", **_COLUMNS, score_column="score", min_score=0.5).rows())
    assert [row.example is Rule.LOW_SCORE for row in scored] == [True] * 5 + [False] * 4 + [True]
    assert scored[5] == rows[5]


@pytest.mark.parametrize(
    ("score", "pair"),
    [
        (float("nan"), Rule.LOW_SCORE),
        ("low", Malformed("could not convert string to float: 'low'")),
        (datetime.date(2020, 1, 2), Malformed("no number in column 'score'")),
    ],
)
def test_a_score_that_is_no_number_keeps_nothing(tmp_path, score, pair):
    record = {"de": "Satz", "en": "sentence", "score": score}
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "x.parquet")
    source = ParquetFile(tmp_path / "x.parquet", "de", "de", "en", score_column="score")
    assert list(source.rows()) == [Row("de", pair)]


def test_text_that_is_not_utf_8_names_the_file(tmp_path):
    text = pyarrow.array([b"\xff"]).cast(pyarrow.string(), safe=False)
    table = pyarrow.table({"de": text, "en": ["sentence"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet is not a whole Parquet file: .*utf-8"):
        list(ParquetFile(tmp_path / "x.parquet", "de", "de", "en").rows())


def test_spans_are_even_ranges_of_row_groups(path, monkeypatch):
    source = ParquetFile(path, "de", **_COLUMNS)
    whole = list(source.rows())
    assert source.spans() == [range(0, 4)]
    with parquet.ParquetFile(path) as file:
        size = file.metadata.row_group(0).total_byte_size
    for num_bytes, spans in {1: "0 1 2 3 4", 2 * size: "0 2 4", 100 * size: "0 4"}.items():
        monkeypatch.setattr(tsv, "BYTES_PER_SPAN", num_bytes)
        firsts = list(map(int, spans.split()))
        assert source.spans() == [range(*each) for each in itertools.pairwise(firsts)]
        parts = [list(source.rows(span)) for span in source.spans()]
        assert [len(part) for part in parts[:-1]] == [3 * len(each) for each in source.spans()][:-1]
        assert [row.example for part in parts for row in part][:8] == [
            row.example for row in whole[:8]
        ]


def test_what_is_damaged_or_lacks_a_column_is_named(path):
    with pytest.raises(ValueError, match=r"x.parquet has no column en, only id, score, trans"):
        list(ParquetFile(path, "de", "translation.de", "en").rows())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"x.parquet is not a whole Parquet file: \S.*") as error:
        list(ParquetFile(path, "de", **_COLUMNS).rows())
    assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(ValueError, match=r"x.parquet: there is no such file"):
        list(ParquetFile(path, "de", **_COLUMNS).rows())


def test_names_with_dots_and_null(tmp_path):
    table = pyarrow.table({"text.de": ["ein Haus", None], "text.en": ["a house", "two"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    rows = ParquetFile(tmp_path / "x.parquet", "de", "text.de", "text.en").rows()
    assert [row.example for row in rows] == [Pair("ein Haus", "a house"), Pair("", "two")]
