"""Preparing data with a vocabulary that has tokens of languages."""

import numpy as np
import pytest

from data_prep import config as configuration
from data_prep import given_vocabulary, tsv
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from lingvo_gshard.input import records, sentences
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.input.bpe_tokenizer import load_pair
from lingvo_gshard.input.normalization import Normalization
from tests.data_prep import prepared
from tests.input import fairseq_vocabulary_test

_PAIR = Pair("ein Haus", "a house")
_GERMAN = [Pair(f"Satz \ufb01 {i} hier", f"sentence {i} here") for i in range(40)]
_SERBIAN = [Pair(f"реченица {i} овде", f"sentence {i} here") for i in range(30)]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Returns the folder of an NLLB tokenizer."""
    folder = tmp_path_factory.mktemp("given") / "theirs"
    fairseq_vocabulary_test.write_folder(folder, "nllb_bpe")
    return folder


@pytest.fixture(scope="module")
def given(theirs):
    return given_vocabulary.read(theirs, theirs.parent / "data", language_tokens={"x": "wol_Latn"})


@pytest.fixture(scope="module")
def built(theirs):
    """Returns a prepared folder and its manifest."""
    text = theirs.parent / "text"
    tsv.write(text / "train" / "de-en.tsv.gz", _GERMAN)
    tsv.write(text / "train" / "sr-en.tsv.gz", _SERBIAN)
    tsv.write(text / "dev" / "de-en.tsv.gz", [Pair("Probe \ufb01", "Sample one"), _PAIR])
    config = BuildConfig(vocabulary=str(theirs), directions="many_to_many")
    return theirs.parent / "built", prepared.build(text, theirs.parent / "built", config)


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("de", "deu_Latn"),
        ("ar", "arb_Arab"),
        ("fa", None),  # The vocabulary has two codes for it.
        ("sr", "srp_Cyrl"),
        ("lv", "lvs_Latn"),
        ("deu_Latn", "deu_Latn"),
        ("x", "wol_Latn"),
    ],
)
def test_languages_of_the_data_have_codes_of_the_vocabulary(given, language, code):
    if code is None:
        with pytest.raises(ValueError, match=rf"language {language} may be \w+ or .*language_tok"):
            given.code(language)
    else:
        assert given.code(language) == code


def test_languages_without_a_token_are_refused_together(given):
    message = "language chr: the vocabulary has no token for it: .*; language tlh: .* new_languages"
    with pytest.raises(ValueError, match=message):
        given.check(["tlh", "de", "chr"])
    given.check(["de", "sr"])


def test_both_sides_of_records_begin_with_their_languages(built):
    folder, made = built
    assert [language.code for language in made.languages] == ["de", "en-de", "sr", "en-sr"]
    assert made.source_vocabulary == made.target_vocabulary
    source, target = load_pair(folder)
    assert made.source_vocabulary.size == source.vocab_size

    for code, begins in {"de": ("deu_Latn", "eng_Latn"), "en-sr": ("eng_Latn", "srp_Cyrl")}.items():
        shard = records.RecordSource(folder, made.language(code).records["train"])
        example = shard.read(np.arange(1))[0]
        assert example.source_ids[0] == source.languages[begins[0]]
        assert example.target_ids[0] == target.languages[begins[1]]

    # The text is not normalized before the model.
    shard = records.RecordSource(folder, made.language("de").records["train"])
    sources = [example.source_ids.tolist() for example in shard.read(np.arange(40))]
    language = source.languages["deu_Latn"]
    assert sorted(sources) == sorted([language, *source.encode(pair.source)] for pair in _GERMAN)


def test_lines_to_decode_begin_with_both_languages(built):
    folder, made = built
    into_german = made.language("en-de")
    pairs = list(sentences.eval_text(folder / into_german.text["dev"].path))
    assert pairs == [("Sample one", "Probe \ufb01"), ("a house", "ein Haus")]
    assert into_german.line("Sample one") == "eng_Latn deu_Latn Sample one"


def test_a_model_knows_the_languages_of_its_data(built):
    folder, made = built
    facts = TranslationInput.Facts(str(folder))
    assert facts.language_tokens == made.source_vocabulary.languages
    assert len(facts.language_tokens) == 202
    assert facts.languages == ("de", "en-de", "sr", "en-sr")


def test_new_languages_have_tokens(theirs, tmp_path):
    given = given_vocabulary.read(theirs, tmp_path, ["nds_Latn"], {"nds": "nds_Latn"})
    assert given.code("nds") == "nds_Latn"
    again = given_vocabulary.read(tmp_path / "vocab" / "shared.model", tmp_path / "2", ["gsw_Latn"])
    assert again.vocabulary.languages == (*given.vocabulary.languages, "gsw_Latn")
    assert again.vocabulary.size == given.vocabulary.size + 1
    assert again.normalization is Normalization.MODEL


def test_a_vocabulary_that_is_wrong_is_refused(theirs, tmp_path):
    with pytest.raises(ValueError, match="there is no such vocabulary"):
        given_vocabulary.read(tmp_path / "none", tmp_path)
    with pytest.raises(ValueError, match="x is 'de', but the vocabulary has no such token"):
        given_vocabulary.read(theirs, tmp_path, language_tokens={"x": "de"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"vocabulary": "v", "target_vocab_size": 500},
            "target_vocab_size is not a setting .* with",
        ),
        ({"new_languages": ("nds_Latn",)}, "new_languages is not a setting for a build without a"),
        (
            {"vocabulary": "v", "kind": "text", "new_languages": ("nds_Latn",)},
            "new_languages is not a setting for data of kind text",
        ),
    ],
)
def test_settings_that_would_not_hold_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BuildConfig(**settings)


def test_the_file_names_a_vocabulary_beside_it(tmp_path):
    (tmp_path / "de-en.tsv").write_text("a\tb\n")
    path = tmp_path / "build.toml"
    path.write_text(
        'vocabulary = "theirs"\nnew_languages = ["nds_Latn"]\n'
        '[language_tokens]\nsr = "srp_Cyrl"\n'
        '[[sources]]\nformat = "tsv"\npath = "de-en.tsv"\nlanguage = "de"\n'
    )
    _, config = configuration.load(path, {})
    assert config.vocabulary == str(tmp_path / "theirs")
    assert config.new_languages == ("nds_Latn",)
    assert config.settings()["language_tokens"] == {"sr": "srp_Cyrl"}
    assert "vocabulary" not in BuildConfig().settings()
