import gzip

import pytest

from data_prep import source_cleaning, sources, tsv
from data_prep.documents import JsonlDocuments, OneSide
from data_prep.rules import Rule
from data_prep.sources import ColumnsFile, JsonlFile, MosesFiles, PoFile, Row, TsvFile
from data_prep.tsv import Malformed, Pair
from lingvo_gshard.files import text_file

_PO = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\nPlural-Forms: nplurals=3; plural=n;\\n"

msgid "Open\\n"
"the file"
msgstr "Öffne die Datei"

#, fuzzy
msgid "Close"
msgstr "Offen"

msgid "Untranslated"
msgstr ""

msgid "one file"
msgid_plural "%d files"
msgstr[0] "plik"
msgstr[1] "pliki"
msgstr[2] "plików"

#~ msgid "Old"
#~ msgstr "Alt"
"""


def test_pairs_with_an_invalid_score_are_dropped(tmp_path):
    (tmp_path / "x.txt").write_text("nan\ta\tb\n0.5\tc\td\n2\te\tf\n")
    rows = ColumnsFile(tmp_path / "x.txt", "de", 1, 2, score_column=0, min_score=1.0).rows()
    assert [row.example for row in rows] == [Rule.LOW_SCORE, Rule.LOW_SCORE, Pair("e", "f")]


def test_moses(tmp_path):
    (tmp_path / "x.de").write_bytes(b"ein\tHaus\n\n\xff\nzwei\n")
    (tmp_path / "x.en.gz").write_bytes(gzip.compress(b"a house\nnothing\nthree\ntwo"))
    source = MosesFiles(tmp_path / "x.de", tmp_path / "x.en.gz", "de", "train")
    assert list(source.rows()) == [
        Row("de", Pair("ein Haus", "a house")),
        Row("de", Pair("", "nothing")),
        Row("de", Malformed("not UTF-8: invalid start byte at byte 0")),
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
        '{"translation": ["ein Hund"]}\n'
        '{"translation": {"de": "ein Hund", "en": "a dog", "de": "eine Katze"}}\n'
        "{\n" + "[" * 10**5 + "\n"
        '{"translation": {"de": "eins", "en": 1}}\n'
        '{"translation": {"de": "Hallo \\ud83d", "en": "hello"}}\n'
    )
    source = JsonlFile(tmp_path / "x.jsonl", "de", "translation.de", "translation.en")
    rows = list(source.rows())
    assert rows[0] == Row("de", Pair("ein Haus", "a house"))
    assert [row.example[:28] for row in rows[1:]] == [
        "field 'translation.de' is no",
        "not JSON: an object has the ",
        "not JSON: Expecting property",
        "not JSON: it is nested too d",
        "field 'translation.en' is no",
        "'utf-8' codec can't encode c",
    ]


def test_translated_messages(tmp_path):
    path = tmp_path / "de.po"
    path.write_text(_PO)
    assert list(PoFile(path, "de", "train").rows()) == [
        Row("de", Pair("Öffne die Datei", "Open the file")),
        Row("de", Rule.FUZZY),
        Row("de", Rule.UNTRANSLATED),
        Row("de", Pair("plik", "one file")),
        Row("de", Pair("plików", "%d files")),
        Row("de", Rule.OBSOLETE),
    ]


def test_invalid_catalogs_are_refused(tmp_path):
    (tmp_path / "x.po").write_text("this is no catalog\n")
    with pytest.raises(ValueError, match=r"x.po is not a gettext catalog: "):
        list(PoFile(tmp_path / "x.po", "de").rows())
    for charset in ("idna", "none-such"):
        (tmp_path / "x.po").write_text(_PO.replace("UTF-8", charset))
        with pytest.raises(
            ValueError, match=r"x.po is not a gettext catalog: .*(nsupported|unknown)"
        ):
            list(PoFile(tmp_path / "x.po", "de").rows())
    (tmp_path / "x.po").write_text(_PO.replace("UTF-8", "CHARSET"))
    assert len(list(PoFile(tmp_path / "x.po", "de").rows())) == 6
    with pytest.raises(ValueError, match=r"none.po: there is no such file"):
        list(PoFile(tmp_path / "none.po", "de").rows())


def test_a_name_may_contain_dots():
    fields = {"a.b": 1, "a": {"b": 2, "c.d": {"e": 3}}, "x.y": {"z": 4}}
    expected = {"a.b": 1, "a.c.d.e": 3, "x.y.z": 4, "a": fields["a"]}
    assert {name: sources.value_at(fields, name) for name in expected} == expected
    for name in ("b", "a.x", "x.z"):
        assert sources.value_at(fields, name) is sources.MISSING
    assert sources.value_at(fields, "a.b.c") is sources.NO_OBJECT


def test_null_is_an_empty_text(tmp_path):
    lines = ['{"t": {"d": null, "e": "one"}}', '{"t": {"e": "two"}}', '{"t": null}', "{}", "", ""]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    rows = list(JsonlFile(tmp_path / "x.jsonl", "de", "t.d", "t.e").rows())
    pairs = [Pair("", "one"), Pair("", "two"), Pair("", ""), Pair("", "")]
    assert [row.example for row in rows] == [*pairs, Rule.EMPTY]


def test_a_field_that_no_line_has_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{\n[]\n{"id": 1, "t": {"de": "eins"}}\n{"t": {"de": "zwei", "en": "two"}}\n')
    JsonlFile(path, "de", "t.de", "t.en").check()
    message = "x.jsonl: no line has the field t.fr, only id, t.de, t.en"
    for source in (
        JsonlFile(path, "de", "t.de", "t.fr"),
        JsonlDocuments(path, "web", "t.fr"),
        OneSide(JsonlFile(path, "de", "t.de", "t.fr"), "source", None, "train"),
    ):
        with pytest.raises(ValueError, match=message):
            source_cleaning.survey(source)
    path.write_text("")
    JsonlFile(path, "de", "t.de", "t.fr").check()  # An empty file causes a warning elsewhere.


def test_empty_last_lines_are_not_damage(tmp_path):
    (tmp_path / "x.de").write_text("eins\nzwei\n\n\n")
    (tmp_path / "x.en").write_text("one\ntwo\n")
    source = MosesFiles(tmp_path / "x.de", tmp_path / "x.en", "de")
    pairs = [Pair("eins", "one"), Pair("zwei", "two")]
    assert [row.example for row in source.rows()] == [*pairs, Rule.EMPTY, Rule.EMPTY]
    (tmp_path / "x.tsv").write_text("eins\tone\n\nzwei\ttwo\n \n")
    rows = [row.example for row in TsvFile(tmp_path / "x.tsv", "de").rows()]
    assert rows == [pairs[0], Rule.EMPTY, pairs[1], Rule.EMPTY]
    (tmp_path / "x.de").write_text("eins\nzwei\n\ndrei\n")
    with pytest.raises(ValueError, match=r"differ in their number of lines: x.en ends after 2|3"):
        list(source.rows())


def test_a_damaged_byte_costs_its_message(tmp_path):
    path = tmp_path / "de.po"
    content = _PO.encode().replace(b'plik"', b'pl\xffik"', 1).replace(b"Open", "O\u2028".encode())
    path.write_bytes(b"\xef\xbb\xbf" + content)
    first, _, _, singular, *_ = PoFile(path, "de").rows()
    assert first.example == Pair("Öffne die Datei", "O the file")
    assert singular.example == Pair("pl\ufffdik", "one file")
    path.write_bytes(_PO.replace("UTF-8", "ISO-8859-1").encode("latin-1"))
    assert next(PoFile(path, "de").rows()).example.source == "Öffne die Datei"


def test_an_invalid_message_is_dropped_and_the_others_are_kept(tmp_path):
    path = tmp_path / "de.po"
    quoted = 'msgid "a"\nmsgstr "ein "Wort""\n\n'
    unterminated = 'msgid "a"\r\nmsgstr "ein "\n"Wort\r\n\n'
    path.write_text(_PO.replace("\n\n", f"\n\n{quoted}{unterminated}", 1))
    rows = [row.example for row in PoFile(path, "de").rows()]
    damaged = [row for row in rows if isinstance(row, Malformed)]
    assert "unescaped double quote" in damaged[0] and 'no quote ends "Wort' in damaged[1]
    path.write_text(_PO)
    whole = [row.example for row in PoFile(path, "de").rows()]
    assert rows == [*damaged, *whole]


def test_no_line_break_stays_within_a_pair(tmp_path):
    text = "a\rb\x0bc\ta\x85b\u2028c\n"
    (tmp_path / "x.tsv").write_text(text, newline="")
    assert [row.example for row in TsvFile(tmp_path / "x.tsv", "de").rows()] == [
        Pair("a b c", "a b c")
    ]


def test_a_line_that_exceeds_the_memory_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(text_file, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "a.tsv.gz"
    long_line = b"x" * (5 << 20) + b"\n"
    path.write_bytes(gzip.compress(b"a\tb\n" + long_line + b"c\td\n" + long_line.rstrip()))
    rows = list(tsv.read_lines(path, tsv.parse))
    assert [type(row).__name__ for row in rows] == ["Pair", "Malformed", "Pair", "Malformed"]
    assert "it has over 1 MiB" in str(rows[1])
