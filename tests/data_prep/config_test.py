import pathlib
import re

import pytest

from data_prep import config
from data_prep.multilingual import TfdsSplit, TmxFile
from data_prep.sources import JsonlFile, MosesFiles, PoFile, TsvFile


def _load(folder, text, **settings):
    (folder / "data.toml").write_text(text)
    return config.load(folder / "data.toml", settings)


def test_every_format(tmp_path):
    for name in ("train/de-en.tsv", "a.jsonl", "b.jsonl", "m.tmx", "de.po", "t.tsv.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sources, made = _load(
        tmp_path,
        """
        source_vocab_size = 64000
        target_vocab_size = 32000
        [scripts]
        sr = ["Cyrl", "Latn"]
        [[sources]]
        format = "folder"
        path = "."
        [[sources]]
        format = "tsv"
        path = "t.tsv.gz"
        language = "iw"
        split = "test"
        [[sources]]
        format = "moses"
        source = "x.de"
        english = "x.en"
        language = "de"
        [[sources]]
        format = "tmx"
        path = "*.tmx"
        languages = ["pt_BR"]
        [[sources]]
        format = "jsonl"
        path = "*.jsonl"
        language = "de"
        source_field = "de"
        english_field = "en"
        split = "train"
        [[sources]]
        format = "po"
        path = "de.po"
        language = "de"
        [[sources]]
        format = "tfds"
        name = "flores/neen"
        tfds_split = "validation"
        data_dir = "tfds"
        split = "dev"
        """,
        target_vocab_size=500,
    )
    assert sources == (
        TsvFile(tmp_path / "train" / "de-en.tsv", "de", "train"),
        TsvFile(tmp_path / "t.tsv.gz", "he", "test"),
        MosesFiles(tmp_path / "x.de", tmp_path / "x.en", "de"),
        TmxFile(tmp_path / "m.tmx", ("pt-BR",)),
        JsonlFile(tmp_path / "a.jsonl", "de", "de", "en", "train"),
        JsonlFile(tmp_path / "b.jsonl", "de", "de", "en", "train"),
        PoFile(tmp_path / "de.po", "de"),
        TfdsSplit("flores/neen", "validation", tmp_path / "tfds", split="dev"),
    )
    assert (made.source_vocab_size, made.target_vocab_size) == (64000, 500)
    assert made.scripts == {"sr": ("Cyrl", "Latn")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", r"data.toml: "),
        ("", r"no \[\[sources\]\]"),
        ("vocab_size = 3", r"the file has no vocab_size: there is character_coverage, "),
        ("model_type = 'word'", r"model_type 'word': expected one of bpe, unigram"),
        ("model_type = 3", r"model_type 3: expected a value of type str"),
        ("max_pieces = 3.5", r"max_pieces 3.5: expected a value of type int"),
        ("source_vocab_size = 12", r"source_vocab_size 12: expected at least 261"),
        ("held_out_share = 0.6", r"held_out_share 0.6: expected 0 to 0.5"),
        ("scripts = {sr = 'Cyrl'}", r"scripts 'Cyrl': expected a list"),
        ("scripts = {sr = ['Cyrillic']}", r"script 'Cyrillic': expected an ISO 15924 code"),
        ("sources = 'x'", r"expected tables, each under \[\[sources\]\]"),
        ("[[sources]]\nformat = 'csv'", r"format 'csv': expected one of folder, tsv, tmx, "),
        ("[[sources]]\nformat = 'tsv'\npath = '*.tsv'", r"no file matches path '\*.tsv'"),
        ("[[sources]]\nformat = 'tsv'\nsplit = 'valid'", r"split 'valid': expected one of train"),
        ("[[sources]]\nformat = 'po'\nlanguage = 'xx'", r"'xx' is no language"),
        ("[[sources]]\nformat = 'moses'\nsource = 'x'", r"moses needs english, language"),
        ("[[sources]]\nformat = 'moses'\nfile = 'x'", r"moses has no file: there is english"),
        ("[[sources]]\nformat = 'folder'\npath = 'none'", r"no input folder .*none"),
        ("[[sources]]\nformat = 'folder'", r"a folder needs path"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, text)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{split}.{side}", ["dev", "train"]),
        ("*/{language}.{split}", "'*/{language}.{split}'"),
        ("{pair}.{split}", "fr-nl.dev: fr-nl is no pair with English"),
        ("{lang}.tsv", r"expected one of language, pair, side, split"),
    ],
)
def test_placeholders(tmp_path, path, expected):
    for name in ("train.de", "train.en", "dev.de", "dev.en", "late.de", "fr-nl.dev"):
        (tmp_path / name).touch()
    text = f"[[sources]]\nformat = 'moses'\npath = '{path}'\nlanguage = 'de'"
    if isinstance(expected, list):
        sources, _ = _load(tmp_path, text)
        assert sources == tuple(
            MosesFiles(tmp_path / f"{split}.de", tmp_path / f"{split}.en", "de", split)
            for split in expected
        )
    else:
        with pytest.raises(ValueError, match=re.escape(expected)):
            _load(tmp_path, text)


def test_a_file_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "de-en.tsv").touch()
    twice = """
    [[sources]]
    format = "folder"
    path = "."
    [[sources]]
    format = "tsv"
    path = "train/../train/*.tsv"
    language = "de"
    split = "{}"
    """
    with pytest.raises(ValueError, match=r"de-en.tsv is there twice for the same language and spl"):
        _load(tmp_path, twice.format("train"))
    assert len(_load(tmp_path, twice.format("dev"))[0]) == 2


def test_a_path_may_be_absolute(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.tsv").touch()
    sources, _ = _load(
        tmp_path / "x",
        f"[[sources]]\nformat = 'tsv'\npath = '{tmp_path}/**/*.tsv'\nlanguage = 'de'",
    )
    assert sources == (TsvFile(tmp_path / "x" / "a.tsv", "de"),)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.toml"):
        config.load(pathlib.Path(tmp_path, "none.toml"), {})
