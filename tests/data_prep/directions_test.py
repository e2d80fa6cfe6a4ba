import dataclasses

import numpy as np
import pytest

from data_prep import directions, tsv
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from lingvo_gshard.input import manifest, records, sentences
from lingvo_gshard.input.bpe_tokenizer import load_pair
from tests.data_prep import prepared
from xla_spmd.files import digests

_CONFIG = BuildConfig(source_vocab_size=400, target_vocab_size=400)
_PAIR = Pair("ein Haus", "a house")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("many_to_english", {"de": ("ein Haus", "a house")}),
        ("english_to_many", {"en-de": ("<2de> a house", "ein Haus")}),
        (
            "many_to_many",
            {"de": ("<2en> ein Haus", "a house"), "en-de": ("<2de> a house", "ein Haus")},
        ),
    ],
)
def test_the_directions_of_a_language(setting, expected):
    found = directions.of("de", setting)
    assert {one.code: one.record_sides(_PAIR) for one in found} == expected


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("directions")
    long = Pair("lang " * 30, "short")
    for code, number in {"de": 90, "fr": 40}.items():
        pairs = [Pair(f"{code} Satz {i} hier", f"sentence {i} here") for i in range(number)]
        tsv.write(folder / "text" / "train" / f"{code}-en.tsv.gz", [*pairs, long, long])
    tsv.write(folder / "text" / "dev" / "fr-en.tsv.gz", [Pair("Probe eins", "Sample one"), _PAIR])
    tsv.write(folder / "text" / "test" / "ja-en.tsv.gz", [Pair("水", "water")])
    config = dataclasses.replace(_CONFIG, max_pieces=25, max_length_ratio=99)
    config = dataclasses.replace(config, directions="many_to_many")
    return folder, prepared.build(folder / "text", folder / "data", config)


def test_both_directions_have_records_and_text(built):
    folder, made = built
    assert [one.code for one in made.languages] == ["de", "en-de", "fr", "en-fr", "ja"]
    counts = {
        one.code: {split: entry.num_examples for split, entry in one.records.items()}
        for one in made.languages
    }
    german, french = {"train": 90}, {"train": 40, "dev": 2}
    # No training text has Japanese as its target.
    expected = {"de": german, "en-de": german, "fr": french, "en-fr": french, "ja": {"test": 1}}
    assert counts == expected
    for code in ("de", "en-de", "fr", "en-fr"):
        assert made.language(code).dropped == {"duplicate": 1, "too_many_pieces": 1}
    text = made.language("en-fr").text["dev"].path
    assert text == "text/dev/en-fr.tsv.gz"
    # Other programs may read this text, so it must not contain the token.
    pairs = list(sentences.eval_text(folder / "data" / text))
    assert pairs == [("Sample one", "Probe eins"), ("a house", "ein Haus")]
    assert made.language("en-fr").line("Sample one") == "<2fr> Sample one"
    digests.verify(folder / "data", made.files())


def test_records_begin_with_the_target_as_decoded_lines_do(built):
    folder, made = built
    assert made.config["directions"] == "many_to_many"
    source, target = load_pair(folder / "data")
    assert (source.targets, target.targets) == (("de", "en", "fr"), ())
    for code, token in {"fr": "<2en>", "en-fr": "<2fr>"}.items():
        entry = made.language(code)
        shard = records.RecordSource(folder / "data", entry.records["dev"])
        pairs = sentences.eval_text(folder / "data" / entry.text["dev"].path)
        for example, (text, english) in zip(shard.read(np.arange(2)), pairs, strict=True):
            line = entry.line(text)
            ids = example.source_ids.tolist()
            assert ids == source.encode(line)
            # The token is not preceded by a piece for a space.
            assert source.pieces(ids[:1]) == [token]
            assert source.decode(ids) == line
            assert target.decode(example.target_ids) == english


def test_english_may_be_the_only_source(built, tmp_path):
    text = tmp_path / "text" / "de-en.tsv"
    text.parent.mkdir()
    text.write_text("".join(f"Satz {i}\tsentence {i}\n" for i in range(60)))
    config = dataclasses.replace(_CONFIG, directions="english_to_many", held_out_share=0.1)
    made = prepared.build(text.parent, tmp_path / "data", config)
    assert [one.code for one in made.languages] == ["en-de"]
    assert set(made.languages[0].records) == set(manifest.SPLITS)
    assert load_pair(tmp_path / "data")[0].targets == ("de",)


def test_text_into_a_language_without_training_text_is_accounted_for(tmp_path):
    pairs = [Pair(f"Satz {i}", f"sentence {i}") for i in range(30)]
    tsv.write(tmp_path / "text" / "train" / "de-en.tsv.gz", pairs)
    tsv.write(tmp_path / "text" / "dev" / "ja-en.tsv.gz", [Pair("水", "water"), Pair("", "x")])
    config = dataclasses.replace(_CONFIG, directions="english_to_many")
    made = prepared.build(tmp_path / "text", tmp_path / "data", config)
    german, japanese = made.languages
    assert (german.code, german.read, german.kept, german.dropped) == ("en-de", 30, 30, {})
    assert (japanese.code, japanese.read, japanese.kept) == ("ja", 2, 0)
    assert japanese.dropped == {"empty": 1, "no_target": 1}
