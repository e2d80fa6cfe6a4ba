"""Every row of every format is accounted for: it is kept, or a named rule drops it."""

import json
import pathlib

import pyarrow
from pyarrow import parquet

from data_prep import config, engines, multilingual, pipeline, source_tables
from lingvo_gshard.input import manifest

_GOOD = [(f"Satz Nummer {i} hier", f"sentence number {i} here") for i in range(6)]
_LONG = ("lang " * 60, "long " * 60)

_SETTINGS = {
    "source_vocab_size": 340,
    "target_vocab_size": 340,
    "max_pieces": 60,
    "max_malformed_share": 0.5,
}
_SIDES = {"source_field": "s", "english_field": "e"}
_COLUMNS = {"source_column": "s", "english_column": "e"}
_SCORED = {"source_column": 1, "english_column": 2, "score_column": 0, "min_score": 0.5}
_SOURCES = [
    {"format": "tsv", "path": "x.tsv", "language": "de", "split": "train"},
    {"format": "tsv", "path": "dev.tsv", "language": "de", "split": "dev"},
    {"format": "tsv", "path": "more.tsv", "language": "de", "text_split": "more"},
    {"format": "columns", "path": "x.columns", "language": "fr", "split": "train", **_SCORED},
    {"format": "moses", "source": "x.it", "english": "x.en", "language": "it", "split": "train"},
    {"format": "jsonl", "path": "x.jsonl", "language": "es", "split": "train", **_SIDES},
    {"format": "po", "path": "x.po", "language": "nl", "split": "train"},
    {"format": "tmx", "path": "x.tmx", "split": "train"},
    {"format": "parquet", "path": "x.parquet", "language": "sv", "split": "train", **_COLUMNS},
    {"format": "tfds", "name": "talks", "tfds_split": "train", "split": "train"},
    {"format": "folder", "path": "folder"},
]
# By language: the rows read, kept and dropped, counted by hand in the files that `_write` writes.
_EXPECTED = {
    "de": (
        14,
        9,
        {"empty": 1, "malformed": 1, "held_out": 1, "duplicate": 1, "too_many_pieces": 1},
    ),
    "fr": (8, 6, {"low_score": 1, "malformed": 1}),
    "it": (8, 6, {"empty": 1, "malformed": 1}),
    "es": (8, 6, {"malformed": 1, "undecodable": 1}),
    "nl": (10, 7, {"fuzzy": 1, "untranslated": 1, "obsolete": 1}),
    "cs": (7, 6, {"unpaired": 1}),
    "cz": (2, 0, {"unknown_language": 2}),
    "en": (1, 0, {"unpaired": 1}),
    "sv": (7, 6, {"identical": 1}),
    "da": (7, 6, {"unpaired": 1}),
    "klingon9": (1, 0, {"unknown_language": 1}),
    "fi": (6, 6, {}),
}


def _lines(pairs, form="{}\t{}\n"):
    return "".join(form.format(*pair) for pair in pairs)


def _write(folder: pathlib.Path) -> None:
    good = _lines(_GOOD)
    held_out = "noch ein Satz\tone more sentence\n"
    (folder / "x.tsv").write_text(good + "\n" + "no tab\n" + held_out + _lines([_GOOD[0], _LONG]))
    (folder / "dev.tsv").write_text("anders\tone more sentence\nzwei\ttwo\n")
    (folder / "more.tsv").write_text("drei\tthree\n")
    (folder / "x.columns").write_text(_lines(_GOOD, "0.9\t{}\t{}\n") + "0.1\ta\tb\nthree\n")
    (folder / "x.it").write_bytes(_lines(_GOOD, "{0}\n").encode() + b"\nbad \xff\n")
    (folder / "x.en").write_text(_lines(_GOOD, "{1}\n") + "nothing\nbad\n")

    jsonl = [json.dumps({"s": source, "e": english}) for source, english in _GOOD]
    damaged = json.dumps({"s": "da\ufffdmaged text", "e": "a damaged text"})
    (folder / "x.jsonl").write_text("\n".join([*jsonl, damaged, "{"]) + "\n")

    entries = _lines(_GOOD, 'msgid "{1}"\nmsgstr "{0}"\n\n')
    others = (
        'msgid "a"\nmsgstr ""\n\n#, fuzzy\nmsgid "b"\nmsgstr "c"\n\n#~ msgid "d"\n#~ msgstr "e"\n'
    )
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
    plural = 'msgid "one file"\nmsgid_plural ""\nmsgstr[0] "een bestand"\n\n'
    (folder / "x.po").write_text(header + entries + plural + others)

    unit = '<tu><tuv xml:lang="en"><seg>{1}</seg></tuv><tuv xml:lang="cs"><seg>{0}</seg></tuv></tu>'
    units = _lines(_GOOD, unit)
    for tag, text in (("cz", "jedna"), ("cz", "dva"), ("en", "English alone")):
        units += f'<tu><tuv xml:lang="en"><seg>x</seg></tuv><tuv xml:lang="{tag}"><seg>{text}'
        units += "</seg></tuv></tu>"
    units += '<tu><tuv xml:lang="cs"><seg>sama</seg></tuv></tu>'
    (folder / "x.tmx").write_text(f"<tmx><body>{units}</body></tmx>")

    records = [
        {"s": source, "e": english} for source, english in [*_GOOD, ("the same", "the same")]
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), folder / "x.parquet")
    (folder / "folder").mkdir()
    (folder / "folder" / "fi-en.tsv").write_text(good)


def _talks(self, at_least=None):
    for source, english in _GOOD:
        yield {"da": source.encode(), "en": english.encode()}
    yield {"da": b"alene", "klingon9": b"qa"}


def _build(folder, settings, tables):
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    for table in tables:
        text += "[[sources]]\n"
        text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())
    (folder / "c.toml").write_text(text)

    sources, settings = config.load(folder / "c.toml", {})
    pipeline.run_through(pipeline.Step.REPORT, sources, folder / "data", settings, engines.pool(1))
    return sources, manifest.load(folder / "data")


def test_every_format_of_pairs_accounts_for_all_that_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(multilingual.TfdsSource, "examples", _talks)
    _write(tmp_path)
    sources, data = _build(tmp_path, _SETTINGS, _SOURCES)
    formats = set(source_tables._FORMATS[manifest.Kind.PARALLEL].values())
    assert {type(source) for source in sources} == formats

    found = {one.code: (one.read, one.kept, one.dropped) for one in data.languages}
    assert found == _EXPECTED
    rows = json.loads((tmp_path / "data/report/report.json").read_text())
    assert {row["code"]: row["read"] for row in rows} == {c: e[0] for c, e in _EXPECTED.items()}
    assert all(row["read"] == row["kept"] + sum(row["dropped"].values()) for row in rows)


def test_every_format_of_documents_accounts_for_all_that_it_reads(tmp_path, monkeypatch):
    texts = [source for source, _ in _GOOD]
    lines = "".join(f"{text}\n" for text in texts)
    monkeypatch.setattr(
        multilingual.TfdsSource, "examples", lambda *args: ({"text": t.encode()} for t in texts)
    )
    (tmp_path / "x.txt").write_text(lines + "\n" + texts[0] + "\n")
    (tmp_path / "x.blocks").write_bytes(lines.encode() + b"\n\nbad \xff\nblock\n\n-----------\n")
    objects = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "x.jsonl").write_text(objects + "{}\n")
    table = pyarrow.Table.from_pylist([{"text": text} for text in texts])
    parquet.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "x.tsv").write_text(_lines(_GOOD) + "no tab\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "f.txt").write_text(lines)

    train = {"split": "train"}
    tables = [
        {"format": "text", "path": "x.txt", "corpus": "l", "document": "line", **train},
        {"format": "text", "path": "x.blocks", "corpus": "b", "document": "block", **train},
        {"format": "jsonl", "path": "x.jsonl", "corpus": "j", "field": "text", **train},
        {"format": "parquet", "path": "x.parquet", "corpus": "p", "column": "text", **train},
        {"format": "tfds", "name": "t", "tfds_split": "train", "corpus": "t", "feature": "text"}
        | train,
        {"format": "tsv", "path": "x.tsv", "language": "de", "side": "source", **train},
        {"format": "folder", "path": "folder"},
    ]
    settings = {"kind": "text", "text_vocab_size": 300, "max_malformed_share": 0.5}
    settings["held_out_share"] = 0.0
    _, data = _build(tmp_path, settings, tables)
    assert {one.code: (one.read, one.kept, one.dropped) for one in data.languages} == {
        "l": (8, 6, {"duplicate": 1, "empty": 1}),
        "b": (3, 1, {"malformed": 1, "repeated": 1}),
        "j": (7, 6, {"empty": 1}),
        "p": (6, 6, {}),
        "t": (6, 6, {}),
        "de": (7, 6, {"malformed": 1}),
        "f": (6, 6, {}),
    }
