import itertools
import subprocess
import sys
import unicodedata

import pytest

from data_prep import constructed, keys, meanings, tsv

_NUM_PAIRS = {language.code: language.num_pairs for language in constructed.LANGUAGES}
_FAMILIES = [
    [language.code for language in constructed.LANGUAGES if language.family == family]
    for family in constructed.FAMILIES.values()
]
_CODES = list(_NUM_PAIRS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("constructed")
    constructed.write_corpus(folder, seed=5)
    return folder


@pytest.fixture(scope="module")
def speakers():
    return {speaker.language.code: speaker for speaker in constructed.speakers(seed=5)}


def _read(folder, split, code):
    return list(tsv.read(folder / split / f"{code}-en.tsv.gz"))


@pytest.mark.slow
def test_fourteen_languages_of_four_families_have_32000_to_300_pairs(corpus):
    assert [len(family) for family in _FAMILIES] == [4, 4, 3, 3]
    assert {code: len(_read(corpus, "train", code)) for code in _CODES} == _NUM_PAIRS
    geometric = [round(32_000 * (300 / 32_000) ** (rank / 13)) for rank in range(14)]
    assert list(_NUM_PAIRS.values()) == geometric


@pytest.mark.slow
def test_a_source_sentence_has_one_english_translation(corpus):
    for code in _CODES:
        english_of = {}
        for split in ("train", "dev", "test"):
            for pair in _read(corpus, split, code):
                assert unicodedata.normalize("NFKC", pair.source) == pair.source
                assert english_of.setdefault(pair.source, pair.english) == pair.english
        assert len(english_of) == _NUM_PAIRS[code] + 200


@pytest.mark.slow
def test_no_english_sentence_is_in_two_splits(corpus):
    by_split = {
        split: {
            keys.english(pair.english) for code in _CODES for pair in _read(corpus, split, code)
        }
        for split in ("train", "dev", "test")
    }
    assert len(by_split["dev"]) == len(by_split["test"]) == 100
    for one, other in itertools.combinations(by_split.values(), 2):
        assert one.isdisjoint(other)


# Another process has another hash seed, which would show if the order of a set mattered.


def test_another_process_has_the_same_sentences(speakers):
    code = (
        "from data_prep import constructed, meanings\n"
        "drawn = meanings.draw(seed=5, count=50)\n"
        "said = [list(map(s.sentence, drawn)) for s in constructed.speakers(seed=5)]\n"
        "print(repr((said, list(map(meanings.english, drawn)))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    drawn = meanings.draw(seed=5, count=50)
    said = [list(map(speaker.sentence, drawn)) for speaker in speakers.values()]
    assert done.stdout == f"{(said, list(map(meanings.english, drawn)))!r}\n"


@pytest.mark.slow
def test_another_seed_gives_other_words_and_sentences(corpus, speakers):
    drawn = meanings.draw(seed=6, count=100)
    assert (
        len(
            set(map(meanings.english, drawn))
            & {pair.english for pair in _read(corpus, "dev", "qta")}
        )
        < 5
    )
    for other in constructed.speakers(seed=6):
        speaker = speakers[other.language.code]
        assert speaker.sentence(drawn[0]) != other.sentence(drawn[0])
