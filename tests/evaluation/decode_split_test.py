"""Splits of a small folder, translated by a toy decoder that reverses words."""

import dataclasses
import json
import types

import pytest

from data_prep import tsv
from data_prep.tsv import Pair
from lingvo_gshard.evaluation import decode_split, quality
from lingvo_gshard.input import manifest
from lingvo_gshard.input.manifest import Language, Manifest, Records, Shard, Vocabulary
from tests.decoding import vocabularies
from tests.decoding.reverser import Letters, Reverser
from xla_spmd.files import digests

# The references of `aa` equal the decoder's results for its sources.
_PAIRS = {
    "aa": [Pair("ab", "ba"), Pair("cde", "edc"), Pair("fg", "gf")],
    "br": [Pair("abc", "abc"), Pair("de", "de")],
}
_TRAIN_PAIRS = {"aa": 30, "br": 900}


@pytest.fixture
def data_dir(tmp_path):
    """A folder with the text of a test split, and of flores, which only `br` has."""
    folder = tmp_path / "data"
    languages = []
    for code, pairs in _PAIRS.items():
        text = {}
        for split in ("test", "flores") if code == "br" else ("test",):
            path = f"text/{split}/{code}-en.tsv.gz"
            tsv.write(folder / path, pairs)
            text[split] = digests.describe(folder, path)

        # Only the numbers of training pairs are read.
        shard = Shard(text["test"], text["test"], _TRAIN_PAIRS[code])
        languages.append(Language(code, {"train": Records((shard,), 1, 1, 0)}, text, {}))

    vocabulary = Vocabulary(languages[0].text["test"], 30)
    manifest.save(Manifest(tuple(languages), vocabulary, vocabulary, {}, {}), folder)
    return folder


@pytest.fixture
def run(data_dir, tmp_path, monkeypatch):
    """A run with a toy decoder, and without a record of its training."""
    monkeypatch.setattr(decode_split, "recorded", lambda logdir: None)
    monkeypatch.setattr(decode_split, "check_decoded", lambda model, params: None)
    decoder = Reverser(2, (4, 8))
    (tmp_path / "run").mkdir()
    return types.SimpleNamespace(
        logdir=str(tmp_path / "run"),
        launch=types.SimpleNamespace(model="toy", data_dir=str(data_dir)),
        params=types.SimpleNamespace(decode=types.SimpleNamespace(max_sentences=None, seed=0)),
        decoder=lambda: (decoder, Letters(), Letters()),
    )


def test_each_language_has_its_lines_and_its_scores(run, tmp_path, capsys):
    decode_split.decode_split(run, "test")
    folder = tmp_path / "run/decode_test"
    assert (folder / "aa.txt").read_text() == (folder / "aa.reference.txt").read_text()
    assert (folder / "aa.source.txt").read_text() == "ab\ncde\nfg\n"
    assert (folder / "br.txt").read_text() == "cba\ned\n"
    assert (folder / "br.reference.txt").read_text() == "abc\nde\n"

    scores = json.loads((folder / "scores.json").read_text())
    rows = {row["code"]: row for row in scores["languages"]}
    assert list(rows) == ["br", "aa"]  # Most training pairs first.
    assert (rows["aa"]["train_pairs"], rows["aa"]["sentences"]) == (30, 3)
    assert rows["aa"]["chrf"]["value"] == pytest.approx(100.0)
    assert rows["br"]["chrf"]["value"] < 50

    assert (folder / "bleu.png").exists() and not (folder / "parts").exists()
    printed = capsys.readouterr().out
    assert "average" in printed and f"Wrote {folder}/scores.json, bleu.png and one" in printed


def test_references_have_the_form_of_translations_and_one_line_each(run, data_dir, tmp_path):
    """A line may contain line breaks of any kind other than newlines."""
    raw = [Pair("a\rb", "ba\u2028\x85x² e\u0301"), Pair("cde", "edc\x0b\u200b，"), Pair("fg", "gf")]
    tsv.write(data_dir / "text/test/aa-en.tsv.gz", raw)
    data = manifest.load(data_dir)
    text = {"test": digests.describe(data_dir, "text/test/aa-en.tsv.gz")}
    aa = dataclasses.replace(data.languages[0], text=text)
    manifest.save(dataclasses.replace(data, languages=(aa,)), data_dir)

    decode_split.decode_split(run, "test")
    folder = tmp_path / "run/decode_test"
    assert (folder / "aa.reference.txt").read_text() == "ba x2 é\nedc ,\ngf\n"
    assert (folder / "aa.source.txt").read_text() == "a b\ncde\nfg\n"
    names = ("aa.txt", "aa.source.txt", "aa.reference.txt")
    assert [len((folder / name).read_text().splitlines()) for name in names] == [3, 3, 3]


def test_only_the_first_sentences_may_be_wanted(run, tmp_path):
    run.params.decode.max_sentences = 2
    decode_split.decode_split(run, "test")
    assert (tmp_path / "run/decode_test/aa.txt").read_text() == "ba\nedc\n"
    assert (tmp_path / "run/decode_test/br.txt").read_text() == "cba\ned\n"


def test_a_split_that_some_languages_have_is_decoded_for_these(run, tmp_path):
    decode_split.decode_split(run, "flores")
    written = {path.name for path in (tmp_path / "run/decode_flores").glob("*.txt")}
    assert written == {"br.txt", "br.source.txt", "br.reference.txt"}


def test_finished_translations_are_not_repeated(run, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(quality, "score", killed)
        decode_split.decode_split(run, "test")
    assert (tmp_path / "run/decode_test/parts").exists()

    decoder, *_ = run.decoder()
    decoder.shapes.clear()
    decode_split.decode_split(run, "test")
    assert decoder.shapes == []
    assert (tmp_path / "run/decode_test/aa.txt").read_text() == "ba\nedc\ngf\n"


def test_cut_translations_are_reported_by_language(run, tmp_path, caplog):
    """`abc` and `cde` fill their rows, so their EOS is forced, and counts in their scores."""
    decoder, *tokenizers = run.decoder()

    def unlikely_ends(features):
        found = decoder(features)
        return {**found, "token_log_probs": found["token_log_probs"] - 1.0}

    for name in ("spec", "share", "origin"):
        setattr(unlikely_ends, name, getattr(decoder, name))
    run.decoder = lambda: (unlikely_ends, *tokenizers)
    decode_split.decode_split(run, "test")

    scores = json.loads((tmp_path / "run/decode_test/scores.json").read_text())
    shares = {row["code"]: row["cut_share"] for row in scores["languages"]}
    assert shares == {"aa": pytest.approx(1 / 3), "br": 0.5}
    (warning,) = caplog.messages
    assert warning.startswith("2 of 5 lines were cut at the maximum length")
    assert "the first is line 2 of aa." in warning


def test_a_line_without_a_result_is_named_by_its_language(run, data_dir, tmp_path):
    pairs = [Pair("ab", "ba"), Pair("c!d", "edc")]
    tsv.write(data_dir / "text/test/br-en.tsv.gz", pairs)
    data = manifest.load(data_dir)
    text = {"test": digests.describe(data_dir, "text/test/br-en.tsv.gz")}
    br = dataclasses.replace(data.languages[1], text=text)
    manifest.save(dataclasses.replace(data, languages=(data.languages[0], br)), data_dir)

    with pytest.raises(ValueError, match="^line 2 of br has no translation: .* not finite"):
        decode_split.decode_split(run, "test")
    assert not (tmp_path / "run/decode_test/scores.json").exists()


def test_a_maximum_of_0_sentences_is_refused(run):
    run.params.decode.max_sentences = 0
    with pytest.raises(ValueError, match="max_sentences must be 1 or more, .*got 0"):
        decode_split.decode_split(run, "test")


def test_a_split_that_no_language_has_is_refused(run, data_dir):
    message = f"--split=train: no language of {data_dir} has text of it .* are flores, test."
    with pytest.raises(ValueError, match=message):
        decode_split.decode_split(run, "train")


def test_the_tokens_of_bleu_follow_the_target(run, data_dir, tmp_path, capsys):
    """Thai from English, by characters; a language without sentences is left out."""
    tsv.write(data_dir / "text/test/en-th.tsv.gz", [Pair("กขคงจ", "จงคขก")])
    tsv.write(data_dir / "text/test/none-en.tsv.gz", [])
    data = manifest.load(data_dir)
    languages = list(data.languages)
    for code, name in (("en-th", "en-th"), ("none", "none-en")):
        text = {"test": digests.describe(data_dir, f"text/test/{name}.tsv.gz")}
        languages.append(Language(code, {}, text, {}))
    manifest.save(dataclasses.replace(data, languages=tuple(languages)), data_dir)

    decode_split.decode_split(run, "test")
    scores = json.loads((tmp_path / "run/decode_test/scores.json").read_text())
    tokens = {row["code"]: row["bleu"]["signature"] for row in scores["languages"]}
    assert "tok:char" in tokens["en-th"] and "tok:13a" in tokens["aa"] and "none" not in tokens
    assert scores["languages"][-1]["bleu"]["value"] == pytest.approx(100)
    printed = capsys.readouterr().out
    assert printed.startswith("none: there are no sentences to score.")
    assert "BLEU is not averaged" in printed


def test_damaged_text_is_refused_before_it_is_translated(run, data_dir):
    path = data_dir / "text/test/br-en.tsv.gz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=path.name):
        decode_split.decode_split(run, "test")


@pytest.mark.parametrize("is_old", [False, True])
def test_files_for_other_programs_have_no_language_tokens(run, data_dir, tmp_path, is_old):
    """The text of older folders begins with the token itself; text that looks like one stays."""
    sources = ["ba li", "<2fr> ke", "li <2de> ba"]
    written = [f"<2de> {source}" for source in sources] if is_old else sources
    tsv.write(data_dir / "text/test/en-de.tsv.gz", [Pair(source, "ba") for source in written])
    text = {"test": digests.describe(data_dir, "text/test/en-de.tsv.gz")}
    language = Language("en-de", {}, text, {}, beginning="" if is_old else "<2de>")
    data = dataclasses.replace(manifest.load(data_dir), languages=(language,))
    manifest.save(data, data_dir)

    tokenizer = vocabularies.train(tmp_path / "x.model", symbols=("<2de>", "<2fr>"))
    decoder = Reverser(3, (64,))
    decoder.spec = dataclasses.replace(decoder.spec, targets=tokenizer.targets)
    run.decoder = lambda: (decoder, tokenizer, tokenizer)
    decode_split.decode_split(run, "test")

    folder = tmp_path / "run/decode_test"
    assert (folder / "en-de.source.txt").read_text().splitlines() == sources
    # The model reads the token: in the reversed result, it is the last piece.
    results = (folder / "en-de.txt").read_text().splitlines()
    assert len(results) == 3 and all(line.endswith("<2de>") for line in results)
