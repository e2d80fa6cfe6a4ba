"""The corpora of Figure 6's models."""

import pytest

from data_prep import tsv
from data_prep.tsv import Pair
from repro.quality import corpora

_PAIRS = {"train": 20, "dev": 9, "test": 3}


@pytest.fixture
def source(tmp_path):
    for code in ("br", "cy"):
        for split, count in _PAIRS.items():
            pairs = [Pair(f"{code} {split} {i}", f"english {i}") for i in range(count)]
            tsv.write(tmp_path / "corpus" / split / f"{code}-en.tsv.gz", pairs)
    return tmp_path / "corpus"


def _pairs(folder, group, split, code):
    return list(tsv.read(folder / group / split / f"{code}-en.tsv.gz"))


def test_a_language_gets_its_number_of_pairs(source, tmp_path):
    corpora.write(source, tmp_path / "text", {"br": 5, "cy": None}, dev_pairs=4)
    for group in ("br", "all"):
        train = _pairs(tmp_path / "text", group, "train", "br")
        assert len(train) == len(set(train)) == 5
        assert set(train) < set(tsv.read(source / "train" / "br-en.tsv.gz"))
        assert len(_pairs(tmp_path / "text", group, "dev", "br")) == 4
        assert len(_pairs(tmp_path / "text", group, "test", "br")) == 3
    assert len(_pairs(tmp_path / "text", "all", "train", "cy")) == 20


def test_whole_languages_are_those_of_the_corpus(source, tmp_path):
    assert corpora.whole_languages(source) == {"br": None, "cy": None}
    with pytest.raises(ValueError, match="expected files train/LANGUAGE-en.tsv.gz, found none"):
        corpora.whole_languages(tmp_path)
