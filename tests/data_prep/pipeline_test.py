import pathlib

import pytest

from data_prep import pipeline, tsv, vocabulary
from data_prep.tsv import Pair
from lingvo_gshard.input import manifest, records
from lingvo_gshard.input.tokenizer import load_pair

_CONFIG = pipeline.BuildConfig(source_vocab_size=500, target_vocab_size=450, max_pieces=30)


def _write_corpus(folder: pathlib.Path) -> None:
    for language, count in {"de": 240, "fr": 61}.items():
        pairs = [Pair(f"{language} Satz {i} hier", f"sentence {i} here") for i in range(count)]
        pairs += [Pair(f"{language} Satz 7 hier", "sentence 7 here"), Pair("xy " * 40, "z " * 40)]
        tsv.write(folder / "train" / f"{language}-en.tsv.gz", pairs)
    held = [Pair(f"Probe \ufb01 {i}", f"Sentence {i} HERE!") for i in range(5)]
    tsv.write(folder / "dev" / "de-en.tsv.gz", [*held, Pair("lang " * 50, "long " * 50)])
    tsv.write(folder / "test" / "ja-en.tsv.gz", [Pair("水", "water")])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    _write_corpus(folder / "text")
    made = pipeline.build(folder / "text", folder / "data", _CONFIG)
    return folder, made


def test_counts_and_drops(built):
    _, made = built
    german, french, japanese = made.languages
    assert [german.code, french.code, japanese.code] == ["de", "fr", "ja"]
    # Five English sentences are in dev; one pair repeats; one is longer than 30 pieces.
    assert german.dropped == {"duplicate": 1, "held_out": 5, "too_many_pieces": 1}
    assert german.num_examples("train") == 235
    assert french.dropped == german.dropped
    assert (german.num_examples("dev"), german.num_examples("test")) == (6, 0)
    assert (japanese.num_examples("train"), japanese.num_examples("test")) == (0, 1)


def test_the_manifest_is_what_was_returned_and_every_file_is_as_it_says(built):
    folder, made = built
    assert manifest.verify(folder / "data") == made
    assert not (folder / "data" / ".unfinished").exists()


def test_records_decode_to_the_cleaned_text_and_text_is_raw(built):
    folder, made = built
    source, target = load_pair(folder / "data")
    language = made.language("de")
    dev = records.RecordSource(folder / "data", language.records["dev"])
    assert source.decode(dev[3].source_ids) == "Probe fi 3"
    assert target.decode(dev[3].target_ids) == "Sentence 3 HERE!"
    raw = tsv.read(folder / "data" / language.text["dev"].path, 0.0).pairs
    assert raw[3] == Pair("Probe \ufb01 3", "Sentence 3 HERE!")
    assert len(raw) == len(dev) == 6
    train = records.RecordSource(folder / "data", language.records["train"])
    assert source.decode(train[0].source_ids) == "de Satz 5 hier"
    tokens = [len(train[i].source_ids) for i in range(len(train))]
    assert sum(tokens) == language.records["train"].num_source_tokens


def test_two_builds_are_byte_identical(built, tmp_path):
    folder, made = built
    again = pipeline.build(folder / "text", tmp_path / "again", _CONFIG)
    assert again == made


def test_an_interrupted_build_leaves_no_manifest(built, tmp_path, monkeypatch):
    folder, _ = built
    pipeline.build(folder / "text", tmp_path / "data", _CONFIG)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(vocabulary, "train", fail)
    with pytest.raises(KeyboardInterrupt):
        pipeline.build(folder / "text", tmp_path / "data", _CONFIG)
    with pytest.raises(ValueError, match=r"no manifest.json in"):
        manifest.load(tmp_path / "data")


def test_a_flat_folder_is_held_out_from(tmp_path):
    tsv.write(
        tmp_path / "text" / "de-en.tsv.gz",
        [Pair(f"Satz {i}", f"sentence number {i}") for i in range(400)],
    )
    config = pipeline.BuildConfig(source_vocab_size=300, target_vocab_size=300, held_out_share=0.1)
    made = pipeline.build(tmp_path / "text", tmp_path / "data", config)
    counts = [made.languages[0].num_examples(split) for split in manifest.SPLITS]
    assert sum(counts) == 400
    assert all(20 < count < 60 for count in counts[1:])
    assert manifest.load(tmp_path / "data") == made


def test_nothing_left_is_an_error(tmp_path):
    tsv.write(tmp_path / "train" / "de-en.tsv.gz", [Pair("nur eins", "only one")])
    tsv.write(tmp_path / "dev" / "de-en.tsv.gz", [Pair("eins", "Only one.")])
    with pytest.raises(ValueError, match=r"no training pair of .* is left after cleaning"):
        pipeline.build(tmp_path, tmp_path / "data", _CONFIG)
