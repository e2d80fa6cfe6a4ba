import gzip

import pytest
import tensorflow_datasets as tfds

from data_prep import sources
from data_prep.sources import (
    JsonlFile,
    MosesFiles,
    PoFile,
    Row,
    TfdsSplit,
    TmxFile,
    TsvFile,
)
from data_prep.tsv import Malformed, Pair

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
_TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en"/><body>
  <tu><tuv xml:lang="EN-US"><seg>a <bpt i="1">&lt;b&gt;</bpt>red<ept i="1">&lt;/b&gt;</ept>
      <hi>house</hi></seg></tuv>
    <tuv xml:lang="de-DE"><seg>ein rotes Haus</seg></tuv>
    <tuv xml:lang="pt-BR"><seg>uma casa vermelha</seg></tuv></tu>
  <tu><tuv xml:lang="de"><seg>ohne Englisch</seg></tuv></tu>
  <tu><tuv lang="en"><seg>two</seg></tuv><tuv lang="pt"><seg>dois</seg></tuv>
    <tuv lang="x-unknown9"><seg>?</seg></tuv></tu>
</body></tmx>
"""


def test_tsv(tmp_path):
    (tmp_path / "x.tsv").write_text("ein Haus\ta house\nno tab\n")
    assert list(TsvFile(tmp_path / "x.tsv", "de").rows()) == [
        Row("de", Pair("ein Haus", "a house")),
        Row("de", Malformed(2, "expected 1 tab, given 0")),
    ]


def test_moses(tmp_path):
    (tmp_path / "x.de").write_bytes(b"ein\tHaus\n\n\xff\nzwei\n")
    (tmp_path / "x.en.gz").write_bytes(gzip.compress(b"a house\nnothing\nthree\ntwo"))
    source = MosesFiles(tmp_path / "x.de", tmp_path / "x.en.gz", "de", "train")
    assert list(source.rows()) == [
        Row("de", Pair("ein Haus", "a house")),
        Row("de", Pair("", "nothing")),
        Row("de", Malformed(3, "not UTF-8: invalid start byte at byte 0")),
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
        '{"translation": {"de": "ein Hund"}}\n'
        "{\n"
        '{"translation": {"de": "eins", "en": 1}}\n'
    )
    source = JsonlFile(tmp_path / "x.jsonl", "de", "translation.de", "translation.en")
    rows = list(source.rows())
    assert rows[0] == Row("de", Pair("ein Haus", "a house"))
    assert [(row.pair.number, row.pair.reason[:28]) for row in rows[1:]] == [
        (2, "no text in field 'translatio"),
        (3, "not JSON: Expecting property"),
        (4, "no text in field 'translatio"),
    ]


def test_translated_messages(tmp_path):
    path = tmp_path / "de.po"
    path.write_text(_PO)
    assert list(PoFile(path, "de", "train").rows()) == [
        Row("de", Pair("Öffne die Datei", "Open the file")),
        Row("de", Pair("plik", "one file")),
        Row("de", Pair("plików", "%d files")),
    ]


def test_what_is_no_catalog_is_refused(tmp_path):
    (tmp_path / "x.po").write_text("this is no catalog\n")
    with pytest.raises(ValueError, match=r"x.po is no gettext catalog: "):
        list(PoFile(tmp_path / "x.po", "de").rows())
    with pytest.raises(ValueError, match=r"no file .*none.po"):
        list(PoFile(tmp_path / "none.po", "de").rows())


@pytest.fixture
def tmx_path(tmp_path):
    path = tmp_path / "memory.tmx.gz"
    path.write_bytes(gzip.compress(_TMX.encode()))
    return path


def test_every_language_beside_english(tmx_path):
    assert list(TmxFile(tmx_path).rows()) == [
        Row("de", Pair("ein rotes Haus", "a red house")),
        Row("pt", Pair("uma casa vermelha", "a red house")),
        Row("pt", Pair("dois", "two")),
    ]


def test_wanted_languages_take_their_regions(tmx_path):
    both = TmxFile(tmx_path, ("pt", "pt-BR"))
    assert [row.language for row in both.rows()] == ["pt-BR", "pt"]
    assert [row.language for row in TmxFile(tmx_path, ("pt",)).rows()] == ["pt", "pt"]


def test_many_units_are_forgotten_as_they_are_read(tmp_path):
    unit = '<tu><tuv lang="en"><seg>n{0}</seg></tuv><tuv lang="de"><seg>z{0}</seg></tuv></tu>'
    path = tmp_path / "many.tmx"
    path.write_text(f"<tmx><body>{''.join(map(unit.format, range(5000)))}</body></tmx>")
    rows = list(TmxFile(path).rows())
    assert [row.pair.english for row in rows] == [f"n{i}" for i in range(5000)]


def test_what_is_no_tmx_is_refused(tmp_path):
    (tmp_path / "x.tmx").write_text("<tmx><body><tu>")
    with pytest.raises(ValueError, match=r"x.tmx is not TMX: "):
        list(TmxFile(tmp_path / "x.tmx").rows())
    with pytest.raises(ValueError, match=r"no file .*none.tmx"):
        list(TmxFile(tmp_path / "none.tmx").rows())


class _Talks(tfds.core.GeneratorBasedBuilder):
    """In the form of ted_multi_translate."""

    name = "small_talks"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        translations = tfds.features.TranslationVariableLanguages(
            languages=["de", "en", "pt-br", "calv"]
        )
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"translations": translations})
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"translations": {"de": "ein Haus", "en": "a house", "pt-br": "uma\ncasa"}}
        yield 1, {"translations": {"de": "ohne Englisch", "pt-br": "sem"}}
        yield 2, {"translations": {"en": "two", "de": "zwei", "calv": "?"}}


class _Pictures(tfds.core.GeneratorBasedBuilder):
    """No translations."""

    name = "small_pictures"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"caption": tfds.features.Text()})
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"caption": "a house"}


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    for builder in (_Talks, _Pictures):
        builder(data_dir=folder).download_and_prepare()
    return folder


def test_a_set_of_variable_languages(tfds_dir):
    found = list(TfdsSplit("small_talks", "train", tfds_dir).rows())
    assert sorted(found, key=str) == [
        Row("de", Pair("ein Haus", "a house")),
        Row("de", Pair("zwei", "two")),
        Row("pt", Pair("uma casa", "a house")),
    ]
    only = TfdsSplit("small_talks", "train", tfds_dir, languages=("pt-BR",))
    assert list(only.rows()) == [Row("pt-BR", Pair("uma casa", "a house"))]


def test_a_real_set_of_two_languages_on_made_up_data(tmp_path):
    with tfds.testing.mock_data(num_examples=3):
        rows = list(TfdsSplit("flores/neen", "test", tmp_path).rows())
    assert [row.language for row in rows] == ["ne"] * 3
    assert all(row.pair.source and row.pair.english for row in rows)


def test_what_is_no_set_or_no_translations_is_refused(tfds_dir):
    with pytest.raises(ValueError, match=r"tfds no_such_set, split train: "):
        list(TfdsSplit("no_such_set", "train", tfds_dir).rows())
    with pytest.raises(ValueError, match=r"tfds small_talks, split later: "):
        list(TfdsSplit("small_talks", "later", tfds_dir).rows())
    with pytest.raises(ValueError, match=r"has features \['caption'\]: expected a translation set"):
        list(TfdsSplit("small_pictures", "train", tfds_dir).rows())


def test_finds_a_split_corpus(tmp_path):
    for split, names in {"train": ["de", "zh-Hant"], "test": ["de", "ja"]}.items():
        (tmp_path / split).mkdir()
        for name in names:
            (tmp_path / split / f"{name}-en.tsv.gz").touch()
    (tmp_path / "train" / "README.md").touch()
    assert sources.in_folder(tmp_path) == (
        TsvFile(tmp_path / "train" / "de-en.tsv.gz", "de", "train"),
        TsvFile(tmp_path / "train" / "zh-Hant-en.tsv.gz", "zh-Hant", "train"),
        TsvFile(tmp_path / "test" / "de-en.tsv.gz", "de", "test"),
        TsvFile(tmp_path / "test" / "ja-en.tsv.gz", "ja", "test"),
    )


def test_finds_a_flat_corpus(tmp_path):
    (tmp_path / "iw-en.tsv").touch()
    assert sources.in_folder(tmp_path) == (TsvFile(tmp_path / "iw-en.tsv", "he", None),)


def test_refuses_what_is_no_corpus(tmp_path):
    with pytest.raises(ValueError, match=r"no input folder .*nowhere"):
        sources.in_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no <lang>-en.tsv or <lang>-en.tsv.gz files in"):
        sources.in_folder(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "de-en.tsv").touch()
    with pytest.raises(ValueError, match=r"files in .*train"):
        sources.in_folder(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "en-de.tsv").touch()
    with pytest.raises(ValueError, match=r"expected a name like de-en.tsv"):
        sources.in_folder(tmp_path)


def test_one_language_in_two_files_is_refused(tmp_path):
    (tmp_path / "he-en.tsv").touch()
    (tmp_path / "iw-en.tsv.gz").touch()
    with pytest.raises(ValueError, match=r"language he is also in he-en.tsv"):
        sources.in_folder(tmp_path)


def test_what_is_no_language_is_refused(tmp_path):
    (tmp_path / "xx-en.tsv").touch()
    with pytest.raises(ValueError, match=r"xx-en.tsv: 'xx' is no language: expected a BCP-47 code"):
        sources.in_folder(tmp_path)
