import pathlib
import re

import pytest

from data_prep import config
from data_prep.documents import JsonlDocuments, OneSide, ParquetDocuments, TextFile, TfdsDocuments
from data_prep.sources import MosesFiles, TsvFile

_DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "data.md"


def _tsv_table(path):
    return f"""
        [[sources]]
        format = "tsv"
        path = "{path}"
        language = "de"
    """


def test_a_file_name_with_pattern_characters_is_found(tmp_path):
    folder = tmp_path / "corpora [a-c]*"
    folder.mkdir()
    for name in ("old[1].tsv", "old1.tsv", "old2.tsv"):
        (folder / name).touch()
    for path, names in [
        ("old[1].tsv", ["old[1].tsv"]),
        ("old?.tsv", ["old1.tsv", "old2.tsv"]),
        ("old[*.tsv", ["old[1].tsv"]),
        (f"{folder}/*].tsv", ["old[1].tsv"]),
    ]:
        sources, _ = _load(folder, _tsv_table(path))
        assert [source.path for source in sources] == [folder / name for name in names]


def _load(folder, text, **settings):
    (folder / "data.toml").write_text(text)
    return config.load(folder / "data.toml", settings)


def test_the_documented_example(tmp_path):
    example, _ = re.findall(r"```toml\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    for name in ("m4bible/de-en.tsv", "mined/fr.parquet", "web/a.jsonl.gz", "memory.tmx.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sources, made = _load(tmp_path, example, target_vocab_size=500)
    assert [type(one).__name__.removesuffix("File") for one in sources] == [
        *("Tsv", "MosesFiles", "Parquet", "Jsonl", "Tmx", "TfdsSplit")
    ]
    assert sources[2].source_column == "translation.fr"
    assert made.target_vocab_size == 500  # A flag has priority.
    assert made.scripts == {"sr": ("Cyrl", "Latn")}


_OTHER_DOCUMENTS = """
[[sources]]
format = "parquet"
path = "web/*.parquet"
corpus = "web"
column = "text"

[[sources]]
format = "tfds"
name = "wiki40b/en"
tfds_split = "train"
corpus = "wiki"
feature = "text"
"""


def test_the_documented_example_of_text_and_other_documents(tmp_path):
    _, example = re.findall(r"```toml\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    for name in ("books/a.txt.gz", "news/dev-1.jsonl", "web/a.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    sources, made = _load(tmp_path, example + _OTHER_DOCUMENTS)
    assert made.kind == "text"
    pairs = MosesFiles(tmp_path / "europarl.de-en.de.gz", tmp_path / "europarl.de-en.en.gz", "de")
    assert sources == (
        TextFile(tmp_path / "books/a.txt.gz", "books", "block", "train"),
        JsonlDocuments(tmp_path / "news/dev-1.jsonl", "news", "page.text", "dev"),
        OneSide(pairs, "english", "talks", None),
        ParquetDocuments(tmp_path / "web/a.parquet", "web", "text"),
        TfdsDocuments("wiki40b/en", "train", "wiki", "text"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no \[\[sources\]\]"),
        ("vocab_size = 3", r"no setting vocab_size, did you mean text_vocab_size\?"),
        ("qqq = 3", r"the file has no setting qqq, only character_coverage, "),
        ("model_type = 'word'", r"model_type 'word': expected one of bpe, unigram"),
        ("max_pieces = 3.5", r"max_pieces 3.5: expected a value of type int"),
        ("source_vocab_size = 12", r"source_vocab_size 12: expected at least 261"),
        ("seed = -1", r"seed -1: expected 0 to 18446744073709551615"),
        ("held_out_share = 0.6", r"held_out_share 0.6: expected 0 to 0.5"),
        (
            "[[sources]]\nformat = 'moses'\nsource = 'x'\nenglish = 'y'\nsplit = 3",
            r"split 3: expected one of train",
        ),
        ("scripts = {sr = 'Cyrl'}", r"scripts 'Cyrl': expected a list"),
        ("scripts = {sr = ['Cyrillic']}", r"script 'Cyrillic': expected an ISO 15924 code"),
        ("[[sources]]\nformat = 'csv'", r"format 'csv': expected one of folder, tsv, tmx, "),
        ("[[sources]]\nformat = 'tsv'\npath = '*.tsv'", r"no file in .* matches path '\*.tsv'"),
        ("[[sources]]\nformat = 'tsv'\nsplit = 'valid'", r"split 'valid': expected one of train"),
        ("[[sources]]\nformat = 'po'\nlanguage = 'xx'", r"'xx' is not a language"),
        ("[[sources]]\nformat = 'moses'\nsource = 'x'", r"moses needs english, language"),
        ("[[sources]]\nformat = 'folder'\npath = 'none'", r"no input folder .*none"),
        (
            "[[sources]]\nformat = 'po'\nlanguage_codes = 'iso'",
            r"language_codes 'iso': expected one",
        ),
        ("[[sources]]\nformat = 'po'\ntext_split = 'dev'", r"text_split 'dev': expected small let"),
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
        ("{pair}.{split}", "fr-fr.dev: expected a pair of two languages, got fr-fr"),
        ("{lang}.tsv", r"{lang} is not one of corpus, language, pair, side, split"),
    ],
)
def test_placeholders(tmp_path, path, expected):
    for name in ("train.de", "train.en", "dev.de", "dev.en", "late.de", "fr-fr.dev"):
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


@pytest.mark.parametrize("path", ["x*/{language}.tsv", "x?/{language}.tsv"])
def test_wildcards_beside_placeholders(tmp_path, path):
    for name in ("x1", "x23"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "de.tsv").touch()
    sources, _ = _load(tmp_path, f"[[sources]]\nformat = 'tsv'\npath = '{path}'")
    assert len(sources) == (2 if "*" in path else 1)
    assert sources[0] == TsvFile(tmp_path / "x1/de.tsv", "de")


def test_a_file_that_is_listed_twice_is_refused(tmp_path):
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
    with pytest.raises(ValueError, match=r"de-en.tsv is given twice for the same language and spl"):
        _load(tmp_path, twice.format("train"))
    assert len(_load(tmp_path, twice.format("dev"))[0]) == 2


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ("languages = ['de', 'fr']", "languages = ['fr', 'it']", True),
        ("languages = ['de']", "languages = ['it']", False),
        ("languages = ['de']", "", True),
        ("", "languages = ['de']", True),
        ("languages = ['de']\nsplit = 'dev'", "languages = ['de']\nsplit = 'test'", False),
    ],
)
def test_languages_of_one_file_may_not_overlap(tmp_path, first, second, overlap):
    (tmp_path / "x.tmx").touch()
    table = "[[sources]]\nformat = 'tmx'\npath = 'x.tmx'\n"
    text = f"{table}{first}\n{table}{second}\n"
    if overlap:
        with pytest.raises(ValueError, match=r"x.tmx is given twice for the same language"):
            _load(tmp_path, text)
    else:
        assert len(_load(tmp_path, text)[0]) == 2


def test_another_threshold_does_not_make_it_other_text(tmp_path):
    (tmp_path / "x.tsv").touch()
    table = "[[sources]]\nformat = 'columns'\npath = 'x.tsv'\nlanguage = 'de'\nsource_column = 0\n"
    table += "english_column = 1\nscore_column = 2\nmin_score = "
    with pytest.raises(ValueError, match=r"x.tsv is given twice for the same language and split"):
        _load(tmp_path, f"{table}1.0\n{table}1.1\n")


def test_languages_have_standard_codes_or_the_sources_names(tmp_path):
    for name in ("deu_Latn", "fra_Latn", "ger", "eng_Latn"):
        (tmp_path / f"train.{name}").touch()
    table = """
    [[sources]]
    format = "moses"
    source = "train.{language}"
    english = "train.eng_Latn"
    split = "train"
    """
    sources, _ = _load(tmp_path, f"{table}\nlanguages = ['de']\nlanguage_codes = 'standard'")
    assert [(one.source.name, one.language) for one in sources] == [
        ("train.deu_Latn", "de"),
        ("train.ger", "de"),
    ]
    assert {one.english.name for one in sources} == {"train.eng_Latn"}
    (tmp_path / "train.old-x1").touch()
    sources, _ = _load(tmp_path, f"{table}\nlanguage_codes = 'source'")
    assert [one.language for one in sources] == ["deu_Latn", "fra_Latn", "ger", "old-x1"]
    with pytest.raises(ValueError, match=r"'old-x1' is not a language: expected a BCP-47 code"):
        _load(tmp_path, table)
    scripts = "scripts = {old-x1 = ['Cyrl', 'Latn']}"
    _, config = _load(tmp_path, f"{scripts}\n{table}\nlanguage_codes = 'source'")
    assert config.scripts == {"old-x1": ("Cyrl", "Latn")}


def test_a_setting_of_a_source_has_its_type(tmp_path):
    (tmp_path / "x.tsv").touch()
    table = "[[sources]]\nformat = 'columns'\nlanguage = 'de'\npath = 'x.tsv'\nenglish_column = 1\n"
    with pytest.raises(ValueError, match="source_column 'de': expected a value of type int"):
        _load(tmp_path, f"{table}source_column = 'de'")
    with pytest.raises(ValueError, match="min_score '1.06': expected a value of type float"):
        _load(tmp_path, f"{table}source_column = 0\nscore_column = 2\nmin_score = '1.06'")
    _load(tmp_path, f"{table}source_column = 0\nscore_column = 2\nmin_score = 1")


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/a.tsv").touch()
    (source,), _ = _load(tmp_path, _tsv_table("~/a.tsv"))
    assert source.path == tmp_path / "home/a.tsv"


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "de.tsv").touch()
    text = '[[sources]]\nformat = "tsv"\npath = "de.tsv"\nlanguage = "de"\n'
    (tmp_path / "c.toml").write_text("\ufeffmax_chars = 7\n" + text, encoding="utf-8")
    sources, settings = config.load(tmp_path / "c.toml", {})
    assert (len(sources), settings.max_chars) == (1, 7)


def test_a_setting_that_older_builds_lack_is_named_only_where_it_is_used():
    assert "unescape" not in config.BuildConfig().settings()
    assert config.BuildConfig(unescape=True).settings()["unescape"]


def test_braces_in_an_existing_name_are_not_placeholders(tmp_path):
    (tmp_path / "old {x}/train").mkdir(parents=True)
    for name in ("old {x}/train/de-en.tsv", "{language}.tsv"):
        (tmp_path / name).touch()
    text = "[[sources]]\nformat = 'folder'\npath = 'old {x}'\n"
    tsv = "[[sources]]\nformat = 'tsv'\nlanguage = 'fr'\npath = '{language}.tsv'\n"
    (german, french), _ = _load(tmp_path, text + tsv)
    assert german.path == tmp_path / "old {x}/train/de-en.tsv"
    assert (french.path, french.language) == (tmp_path / "{language}.tsv", "fr")

    with pytest.raises(ValueError, match="{x} is not one of corpus"):
        _load(tmp_path, text.replace("old", "new"))
