import collections
import dataclasses
import gzip
import pathlib

import pyarrow
import pytest
from pyarrow import parquet as parquet_file

from data_prep import source_cleaning, sources, tsv
from data_prep.config import BuildConfig
from data_prep.parquet import ParquetFile
from data_prep.rules import Rule
from data_prep.source_cleaning import Cleaned
from data_prep.sources import Row
from data_prep.text_chunks import Chunk
from data_prep.tsv import Malformed, Pair

_CONFIG = BuildConfig()
_SCRIPTS = {"de": frozenset({"Latn"}), "fr": frozenset({"Latn"})}


@dataclasses.dataclass(frozen=True)
class _Listed(sources.Source):
    """A source with the given rows."""

    listed: tuple[Row, ...]
    split: str | None = "train"

    def __str__(self):
        return "listed"

    def rows(self, span=tsv.WHOLE):
        return iter(self.listed)


def _clean(folder, *rows, split="train", config=_CONFIG):
    return source_cleaning.clean(_Listed(rows, split), tsv.WHOLE, folder, _SCRIPTS, config)


def _pairs(cleaned):
    return {(chunk.split, chunk.language): list(chunk.examples()) for chunk in cleaned.chunks}


def test_the_survey_counts_the_characters_of_sources():
    rows = (
        Row("de", Pair("ab c1!", "xyz")),
        Row("sr", Pair("аб c", "xyz")),
        Row("de", Malformed("no tab")),
        Row("de", Rule.LOW_SCORE),
        Row("de", Pair("d", "")),
    )
    assert source_cleaning.survey(_Listed(rows)) == {
        "de": {"Latn": 4},
        "sr": {"Cyrl": 2, "Latn": 1},
    }


def test_the_survey_spreads_over_each_language(monkeypatch):
    """Not just of the head, which is Latin here; all other text is Cyrillic."""
    monkeypatch.setattr(source_cleaning, "_SURVEYED_ROWS", 50)
    rows = [Row("sr", Pair("abcd", "x"))] * 300 + [Row("sr", Pair("абвг", "x"))] * 2700
    rows.append(Row("de", Pair("at the end", "x")))
    counts = source_cleaning.survey(_Listed(tuple(rows)))
    assert counts["de"] == {"Latn": 8}
    share = counts["sr"]["Latn"] / counts["sr"].total()
    assert 200 <= counts["sr"].total() < 400 and abs(share - 0.1) < 0.03


@pytest.mark.parametrize("format_name", ["tsv", "gzip", "parquet"])
def test_large_files_are_sampled_from_all_over(tmp_path, monkeypatch, format_name):
    texts = ["head"] * 1000 + ["хвост"] * 3000
    path = tmp_path / "x.tsv"
    if format_name == "parquet":
        records = [{"s": text, "e": f"{i}"} for i, text in enumerate(texts)]
        parquet_file.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=50)
        source = ParquetFile(path, "sr", "s", "e")
    else:
        lines = "".join(f"{text}\t{i}\n" for i, text in enumerate(texts)).encode()
        path = path if format_name == "tsv" else tmp_path / "x.tsv.gz"
        path.write_bytes(lines if format_name == "tsv" else gzip.compress(lines))
        monkeypatch.setattr(sources, "_SAMPLE_BYTES", 200)
        source = sources.TsvFile(path, "sr")

    sample = list(source.sampled_rows())
    num_of_head = sum(row.example.source == "head" for row in sample)
    assert len(set(sample)) == len(sample)
    assert abs(num_of_head / len(sample) - 0.25) < 0.1
    assert len(sample) < 1500 or format_name == "gzip"


def test_scripts_are_those_of_all_surveys_together():
    surveys = [
        {"sr": collections.Counter({"Cyrl": 10})},
        {"sr": collections.Counter({"Latn": 90}), "el": collections.Counter({"Latn": 5})},
    ]
    assert source_cleaning.scripts_by_language(surveys, {"el": ["Grek"]}) == {
        "sr": {"Cyrl", "Latn"},
        "el": {"Grek"},
    }


def test_training_text_is_normalized_and_repaired_and_dropped_pairs_are_counted(tmp_path):
    cleaned = _clean(
        tmp_path,
        Row("de", Pair("ein  ﬁsch", "a fish")),
        Row("de", Pair("schÃ¶n hier", "nice here")),
        Row("de", Pair("gleich", "gleich")),
        Row("fr", Pair("", "empty")),
        Row("fr", Rule.LOW_SCORE),
        Row("fr", Malformed("expected 1 tab, got 0")),
        Row("fr", Pair("un", "one")),
    )
    assert _pairs(cleaned) == {
        ("train", "de"): [Pair("ein ﬁsch", "a fish"), Pair("schön hier", "nice here")],
        ("train", "fr"): [Pair("un", "one")],
    }
    assert cleaned.dropped == {
        ("de", Rule.IDENTICAL): 1,
        ("fr", Rule.EMPTY): 1,
        ("fr", Rule.LOW_SCORE): 1,
        ("fr", Rule.MALFORMED): 1,
    }
    assert cleaned.repaired == {"de": 1}
    assert cleaned.malformed == [(6, "expected 1 tab, got 0")]
    assert (cleaned.num_rows, cleaned.num_malformed) == (7, 1)


def test_a_repaired_pair_that_is_dropped_is_not_counted_as_repaired(tmp_path):
    cleaned = _clean(tmp_path, Row("de", Pair("schÃ¶n", "schön")))
    assert cleaned.dropped == {("de", Rule.IDENTICAL): 1}
    assert cleaned.repaired["de"] == 0


def test_dev_is_unchanged_unless_a_side_is_empty(tmp_path):
    kept = Pair("schÃ¶n  ﬁn", "schön")
    identical = Pair("gleich", "gleich")
    empty = Pair("\u200b", "only a control character")
    rows = [Row("de", pair) for pair in (kept, identical, empty)]
    cleaned = _clean(tmp_path, *rows, split="dev")
    assert _pairs(cleaned) == {("dev", "de"): [kept, identical]}
    assert cleaned.dropped == {("de", Rule.EMPTY): 1}
    assert cleaned.repaired["de"] == 0


def test_without_a_split_the_english_decides_for_all_languages(tmp_path):
    config = dataclasses.replace(_CONFIG, held_out_share=0.25)
    split_of = collections.defaultdict(set)
    for language, mark in (("de", "."), ("fr", "!")):
        rows = [Row(language, Pair(f"{language} {i}", f"Sentence {i}{mark}")) for i in range(100)]
        cleaned = _clean(tmp_path, *rows, split=None, config=config)
        for (split, _), pairs in _pairs(cleaned).items():
            for pair in pairs:
                split_of[pair.english.rstrip(".!")].add(split)
    # Another punctuation does not make it another sentence.
    assert all(len(splits) == 1 for splits in split_of.values())
    counts = collections.Counter(split for (split,) in split_of.values())
    assert counts.total() == 100
    assert 15 < counts["dev"] < 35 and 15 < counts["test"] < 35


def test_a_language_that_was_not_surveyed_has_its_configured_scripts(tmp_path):
    cleaned = _clean(
        tmp_path,
        Row("de", Pair("ein Haus", "a house")),
        Row("el", Pair("это дом", "it is a house")),
        Row("el", Pair("ένα σπίτι", "a home")),
        config=dataclasses.replace(_CONFIG, scripts={"el": ("Grek",)}),
    )
    assert cleaned.dropped == {("el", Rule.WRONG_SCRIPT): 1} and cleaned.num_rows == 3


def _span(num_pairs, first_malformed=(), **dropped):
    chunks = [Chunk("train", "de", pathlib.Path("x"), num_pairs)] if num_pairs else []
    by_rule = {("de", Rule(rule)): number for rule, number in dropped.items()}
    dropped_by_rule = collections.Counter(by_rule)
    return Cleaned(chunks=chunks, dropped=dropped_by_rule, malformed=list(first_malformed))


def test_joined_spans_number_lines_on(monkeypatch):
    logged = []
    monkeypatch.setattr(
        source_cleaning.logging, "warning", lambda *args: logged.append(args[0] % args[1:])
    )
    first = _span(5, [(2, "a"), (7, "b")], malformed=2, ratio=1)
    last = _span(3, [(1, "c")], malformed=1)
    joined = source_cleaning.join(_Listed(()), [first, _span(4), last], 0.5)
    assert joined.malformed == [(2, "a"), (7, "b"), (8 + 4 + 1, "c")]
    assert joined.dropped == {("de", Rule.MALFORMED): 3, ("de", Rule.RATIO): 1}
    assert (joined.num_rows, len(joined.chunks)) == (16, 3)
    assert logged == ["listed:2: skipped: a", "listed:7: skipped: b", "listed:13: skipped: c"]


def test_at_most_ten_malformed_lines_are_reported():
    spans = [_span(90, [(i, "x") for i in range(1, 8)], malformed=7) for _ in range(3)]
    joined = source_cleaning.join(_Listed(()), spans, 0.5)
    assert [number for number, _ in joined.malformed] == [*range(1, 8), 98, 99, 100]
    assert joined.num_malformed == 21


def test_as_many_malformed_lines_as_are_allowed():
    spans = [_span(98, malformed=2)]
    assert source_cleaning.join(_Listed(()), spans, 0.02).num_malformed == 2
    with pytest.raises(ValueError, match=r"^listed: 2 of 100 lines are malformed \(2.0%\), .*1.9%"):
        source_cleaning.join(_Listed(()), spans, 0.019)


def test_an_empty_source_is_reported(monkeypatch):
    logged = []
    monkeypatch.setattr(
        source_cleaning.logging, "warning", lambda *args: logged.append(args[0] % args[1:])
    )
    assert source_cleaning.join(_Listed(()), [Cleaned()], 0.01).num_rows == 0
    assert logged == ["listed is empty"]


def test_entities_are_counted_or_become_text(tmp_path):
    rows = [Row("de", Pair("er &amp; sie", "he and she")), Row("de", Pair("gut so", "it is well"))]
    cleaned = _clean(tmp_path, *rows)
    assert _pairs(cleaned)["train", "de"][0].source == "er &amp; sie"
    assert (cleaned.escaped, cleaned.repaired) == ({"de": 1}, {})

    config = dataclasses.replace(_CONFIG, unescape=True)
    for split, num_repaired in (("train", {"de": 1}), ("dev", {})):
        cleaned = _clean(tmp_path, *rows, split=split, config=config)
        assert _pairs(cleaned)[split, "de"][0].source == "er & sie"
        assert (cleaned.escaped, cleaned.repaired) == ({}, num_repaired)


def test_text_in_a_wrong_encoding_is_counted_unless_it_is_repaired(tmp_path):
    russian = "Сегодня хорошая погода, мы идём гулять"
    utf_8 = russian.encode()
    in_another = utf_8.replace(b"\x98", b"").decode("cp1251")
    rows = [
        Row("ru", Pair(russian, "the weather is good today")),
        Row("ru", Pair(in_another, "the weather is good today, we go for a walk")),
        Row("ru", Pair(utf_8.decode("latin-1"), "the weather is good, we go for a walk")),
        Row("ru", Pair(russian.encode("cp1251").decode("latin-1"), "we go for a walk today")),
    ]
    cleaned = _clean(tmp_path, *rows, config=dataclasses.replace(_CONFIG, scripts={"ru": ["Cyrl"]}))
    # The last one is dropped as well, since it lacks Cyrillic letters.
    assert (cleaned.mojibake, cleaned.repaired) == ({"ru": 2}, {"ru": 1})
    assert cleaned.dropped["ru", Rule.WRONG_SCRIPT] == 1
    assert _clean(tmp_path, *rows, split="dev").mojibake == {}
    joined = source_cleaning.join(_Listed(()), [cleaned, cleaned], 0.01)
    assert joined.mojibake == {"ru": 4}
