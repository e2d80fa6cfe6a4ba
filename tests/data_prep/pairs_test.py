"""Data of language pairs without English."""

import numpy as np
import pytest

from data_prep import config as configuration
from data_prep import languages, tsv
from data_prep.config import BuildConfig
from data_prep.multilingual import TmxFile
from data_prep.tsv import Pair
from lingvo_gshard.input import example_codec, records, sentences
from lingvo_gshard.input.bpe_tokenizer import load_pair
from tests.data_prep import prepared

_BOTH = BuildConfig(source_vocab_size=600, target_vocab_size=600, directions="many_to_many")


def _texts(number):
    """Returns the same sentence in German, French, Russian and English."""
    return (
        f"das ist Satz {number} hier",
        f"voici la phrase {number} ici",
        f"это фраза {number} здесь",
        f"this is sentence {number} here",
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    text = folder / "text"
    all_texts = [_texts(number) for number in range(100)]
    german, french, russian, english = zip(*all_texts, strict=True)
    # One file has the other language first, and so does its name.
    tsv.write(text / "train/fr-de.tsv.gz", map(Pair, french[:60], german[:60]))
    tsv.write(text / "train/de-en.tsv.gz", map(Pair, german[:40], english[:40]))
    tsv.write(text / "train/fr-ru.tsv.gz", map(Pair, french[40:95], russian[40:95]))
    tsv.write(text / "dev/de-en.tsv.gz", map(Pair, german[3:5], english[3:5]))
    tsv.write(text / "dev/fr-ru.tsv.gz", map(Pair, french[50:53], russian[50:53]))
    tsv.write(text / "test/de-ru.tsv.gz", map(Pair, german[90:92], russian[90:92]))
    tsv.write(text / "test/ja-ru.tsv.gz", [Pair("水", "вода")])
    return folder, prepared.build(text, folder / "data", _BOTH)


def test_both_directions_have_records_and_text(built):
    folder, made = built
    counts = {}
    for language in made.languages:
        counts[language.code] = {split: language.num_examples(split) for split in language.records}
    # A sentence of dev or test must not occur in training, on either side of any pair: this drops
    # three in French, two in German, and two in Russian.
    assert counts.pop("de-fr") == counts.pop("fr-de") == {"train": 60 - 2 - 3}
    assert counts.pop("de") == counts.pop("en-de") == {"train": 40 - 2, "dev": 2}
    assert counts.pop("fr-ru") == counts.pop("ru-fr") == {"train": 55 - 3 - 2, "dev": 3}
    # All of these languages have training text, but not this pair.
    assert counts.pop("de-ru") == counts.pop("ru-de") == {"test": 2}
    # Nothing is translated into Japanese, so the pair gets {}: it does not have a direction.
    assert counts == {"ja-ru": {}}
    assert made.language("ja-ru").dropped == {"no_target": 1}
    assert made.language("de-fr").dropped == {"held_out": 5}
    assert made.language("fr-de").scripts == made.language("de-fr").scripts == ("Latn",)
    assert made.language("ru-fr").scripts == ("Cyrl",)

    path = made.language("ru-de").text["test"].path
    assert path == "text/test/ru-de.tsv.gz"
    german, _, russian, _ = _texts(90)
    lines = list(sentences.eval_text(folder / "data" / path))
    assert lines[0] == (russian, german)
    assert made.language("ru-de").beginning == "<2de>"


def test_records_begin_with_their_target(built):
    folder, made = built
    source, target = load_pair(folder / "data")
    assert source.targets == ("de", "en", "fr", "ru")
    for code, token in {"fr-ru": "<2ru>", "ru-fr": "<2fr>"}.items():
        shard = records.RecordSource(folder / "data", made.language(code).records["dev"])
        example = shard.read(np.arange(1))[0]
        assert source.pieces(example.source_ids[:1]) == [token]
        _, french, russian, _ = _texts(50)
        assert target.decode(example.target_ids) == (russian if code == "fr-ru" else french)

    codes = [language.code for language in made.languages]
    assert example_codec.sides("ru-fr", codes) == ("ru", "fr")
    assert set(example_codec.source_languages(codes)) >= {"de", "fr", "ru", "en"}


def test_a_single_direction_is_refused(tmp_path):
    tsv.write(tmp_path / "text/train/de-fr.tsv.gz", [Pair("Haus", "maison")])
    message = (
        'de-fr.tsv.gz: pairs without English need directions = "many_to_many", got "many_to_en'
    )
    with pytest.raises(ValueError, match=message):
        prepared.build(tmp_path / "text", tmp_path / "data", BuildConfig())
    assert not (tmp_path / "data").exists()


def test_a_file_of_settings_names_the_other_language(tmp_path):
    (tmp_path / "a.de").write_text("Haus\n")
    (tmp_path / "a.fr").write_text("maison\n")
    unit = "".join(
        f'<tuv xml:lang="{tag}"><seg>{text}</seg></tuv>'
        for tag, text in {"de": "Haus", "en": "house", "fr": "maison"}.items()
    )
    tmx = f'<tmx version="1.4"><body><tu>{unit}</tu></body></tmx>'
    (tmp_path / "a.tmx").write_text(tmx)
    path = tmp_path / "build.toml"
    path.write_text(
        'directions = "many_to_many"\n[[sources]]\nformat = "moses"\nsource = "a.de"\n'
        'english = "a.fr"\nlanguage = "de"\ntarget_language = "fr"\n'
        '[[sources]]\nformat = "tmx"\npath = "a.tmx"\ntarget_language = "fr"\n'
    )
    (moses, memory), _ = configuration.load(path, {})
    assert moses.is_without_english and memory.is_without_english
    assert [(row.language, row.example) for row in moses.rows()] == [
        ("de+fr", Pair("Haus", "maison"))
    ]
    assert isinstance(memory, TmxFile)
    assert [(row.language, row.example) for row in memory.rows()] == [
        ("de+fr", Pair("Haus", "maison")),
        ("en+fr", Pair("house", "maison")),
    ]

    # In a pair with English, English comes last.
    in_order = [languages.in_order(pair) for pair in ("de+fr", "en+fr", "fr+de", "de", "en-GB+de")]
    assert in_order == ["de+fr", "fr", "de+fr", "de", "de"]
