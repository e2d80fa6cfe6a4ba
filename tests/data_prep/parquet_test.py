import dataclasses
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
    assert rows[8] == Row("de", Pair("", "sentence 8"))  # Null counts as empty text, not as damage.
    assert len(rows) == 10
    scored = list(ParquetFile(path, "de", **_COLUMNS, score_column="score", min_score=0.5).rows())
    assert [row.example is Rule.LOW_SCORE for row in scored] == [True] * 5 + [False] * 4 + [True]
    assert scored[5] == rows[5]


@pytest.mark.parametrize(
    ("score", "pair"),
    [
        (float("nan"), Rule.LOW_SCORE),
        ("low", Malformed("could not convert string to float: 'low'")),
        (datetime.date(2020, 1, 2), Malformed("column 'score' is not a number")),
    ],
)
def test_pairs_with_an_invalid_score_are_dropped(tmp_path, score, pair):
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


def test_damage_and_missing_columns_are_named(path):
    with pytest.raises(ValueError, match=r"x.parquet has no column en, only id, score, trans"):
        list(ParquetFile(path, "de", "translation.de", "en").rows())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"x.parquet is not a whole Parquet file: \S.*") as error:
        list(ParquetFile(path, "de", **_COLUMNS).rows())
    assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(ValueError, match=r"x.parquet: there is no such file"):
        list(ParquetFile(path, "de", **_COLUMNS).rows())


def test_a_null_above_a_column_is_an_empty_text(tmp_path):
    pairs = [{"de": "ein Haus", "en": "a house"}, None]
    table = pyarrow.table({"page": [{"pair": pair} for pair in pairs] + [None]})
    parquet.write_table(table, tmp_path / "x.parquet")
    source = ParquetFile(tmp_path / "x.parquet", "de", "page.pair.de", "page.pair.en")
    empty = Pair("", "")
    assert [row.example for row in source.rows()] == [Pair("ein Haus", "a house"), empty, empty]
    scored = dataclasses.replace(source, score_column="page.pair.en")
    assert [row.example for row in scored.rows()][1:] == [Rule.LOW_SCORE] * 2


_TEXT = pyarrow.array(["x", "y"])


def _struct(*names):
    return pyarrow.StructArray.from_arrays([_TEXT] * len(names), names=names)


@pytest.mark.parametrize(
    ("fields", "repeated"),
    [
        ([("t", _struct("de", "en")), ("id", _TEXT)], None),
        ([("t", _struct("de", "en")), ("id", _TEXT), ("ID", _TEXT)], None),
        # Two columns have the name: the choice must not be left to chance.
        ([("t", _struct("de", "en", "de"))], "t.de"),
        ([("t", _struct("de", "en")), ("t.en", _TEXT)], "t.en"),
        ([("t", _struct("de")), ("t", _struct("en"))], "t.de, t.en"),
        ([("t", _struct("de", "en")), ("x", _TEXT), ("x", _TEXT)], None),
    ],
)
def test_a_name_that_occurs_twice_is_refused(tmp_path, fields, repeated):
    names, arrays = zip(*fields, strict=True)
    table = pyarrow.Table.from_arrays(list(arrays), list(names))
    parquet.write_table(table, tmp_path / "x.parquet")
    rows = ParquetFile(tmp_path / "x.parquet", "de", "t.de", "t.en").rows()
    if repeated is None:
        assert [row.example for row in rows] == [Pair("x", "x"), Pair("y", "y")]
        return
    message = f"x.parquet has more than one column {repeated}, expected one of each name"
    with pytest.raises(ValueError, match=message):
        list(rows)
