import hashlib
import subprocess
import sys
import unicodedata

import pytest

from data_prep import cleaning, constructed, tsv
from data_prep.conlang import families


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("constructed")
    constructed.write_corpus(folder, seed=5)
    return folder


def _read(folder, split, code):
    return list(tsv.read(folder / split / f"{code}-en.tsv.gz"))


def _digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.gz"))
    }


def test_every_family_member_is_ranked_once():
    codes = [language.code for family in families.FAMILIES for language in family.languages]
    assert sorted(codes) == sorted(constructed.LANGUAGES_BY_SIZE)
    assert len(codes) == 14
    assert len(families.FAMILIES) == 4


def test_sizes(corpus):
    expected = constructed.sizes()
    counts = [len(_read(corpus, "train", code)) for code in constructed.LANGUAGES_BY_SIZE]
    assert counts == list(expected.values())
    assert (counts[0], counts[-1]) == (32_000, 300)
    assert 100_000 < sum(counts) < 120_000
    for code in constructed.LANGUAGES_BY_SIZE:
        assert len(_read(corpus, "dev", code)) == len(_read(corpus, "test", code)) == 100


def test_source_determines_english_in_every_language(corpus):
    for code in constructed.LANGUAGES_BY_SIZE:
        english_of = {}
        for split in ("train", "dev", "test"):
            for pair in _read(corpus, split, code):
                source = cleaning.normalize(pair.source)
                assert english_of.setdefault(source, pair.english) == pair.english
        assert len(english_of) == constructed.sizes()[code] + 200


def test_no_english_sentence_is_in_two_splits(corpus):
    keys = {
        split: {
            cleaning.english_key(pair.english)
            for code in constructed.LANGUAGES_BY_SIZE
            for pair in _read(corpus, split, code)
        }
        for split in ("train", "dev", "test")
    }
    assert len(keys["dev"]) == len(keys["test"]) == 100
    assert not keys["train"] & keys["dev"]
    assert not keys["train"] & keys["test"]
    assert not keys["dev"] & keys["test"]


def test_text_is_normalized_and_of_its_length(corpus):
    for code in constructed.LANGUAGES_BY_SIZE:
        for pair in _read(corpus, "dev", code):
            assert unicodedata.normalize("NFKC", pair.source) == pair.source
            assert 4 <= len(pair.english.split()) <= 16


def test_another_process_writes_the_same_bytes(corpus, tmp_path):
    # Another process has another hash seed, which would show where the order of a set leaks.
    command = [sys.executable, "-m", "data_prep.constructed", f"--out={tmp_path}", "--seed=5"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert _digests(tmp_path) == _digests(corpus)


def test_another_seed_gives_other_words_and_sentences(corpus):
    other = constructed.meanings(seed=6, count=100)
    assert len(set(other) & {pair.english for pair in _read(corpus, "dev", "qta")}) < 5
    sentence = next(iter(other.values()))
    first, second = constructed.realizers(5), constructed.realizers(6)
    assert first["qla"].sentence(sentence) != second["qla"].sentence(sentence)
