"""TFDS offline: a real set on TFDS' own made-up data, and two small sets prepared here."""

import pytest
import tensorflow_datasets as tfds

from data_prep.sources.source import Row
from data_prep.sources.tfds_split import TfdsSplit
from data_prep.tsv import Pair


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
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    for builder in (_Talks, _Pictures):
        builder(data_dir=folder).download_and_prepare()
    return folder


def test_a_set_of_variable_languages(data_dir):
    found = list(TfdsSplit("small_talks", "train", data_dir).rows())
    assert sorted(found, key=str) == [
        Row("de", Pair("ein Haus", "a house")),
        Row("de", Pair("zwei", "two")),
        Row("pt", Pair("uma casa", "a house")),
    ]
    only = TfdsSplit("small_talks", "train", data_dir, languages=("pt-BR",))
    assert list(only.rows()) == [Row("pt-BR", Pair("uma casa", "a house"))]


def test_a_real_set_of_two_languages_on_made_up_data(tmp_path):
    with tfds.testing.mock_data(num_examples=3):
        rows = list(TfdsSplit("flores/neen", "test", tmp_path).rows())
    assert [row.language for row in rows] == ["ne"] * 3
    assert all(row.pair.source and row.pair.english for row in rows)


def test_what_is_no_set_or_no_translations_is_refused(data_dir):
    with pytest.raises(ValueError, match=r"tfds no_such_set, split train: "):
        list(TfdsSplit("no_such_set", "train", data_dir).rows())
    with pytest.raises(ValueError, match=r"tfds small_talks, split later: "):
        list(TfdsSplit("small_talks", "later", data_dir).rows())
    with pytest.raises(ValueError, match=r"has features \['caption'\]: expected a translation set"):
        list(TfdsSplit("small_pictures", "train", data_dir).rows())
