import difflib
import hashlib
import itertools
import statistics
import subprocess
import sys
import unicodedata

import pytest

from data_prep import cleaning, constructed, meanings, tsv
from data_prep.constructed import Clause, Noun, Sentence

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


def _digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.gz"))
    }


def test_fourteen_languages_of_four_families_have_32000_to_300_pairs(corpus):
    assert [len(family) for family in _FAMILIES] == [4, 4, 3, 3]
    assert {code: len(_read(corpus, "train", code)) for code in _CODES} == _NUM_PAIRS
    geometric = [round(32_000 * (300 / 32_000) ** (rank / 13)) for rank in range(14)]
    assert list(_NUM_PAIRS.values()) == geometric


def test_a_source_sentence_has_one_english_translation(corpus):
    for code in _CODES:
        english_of = {}
        for split in ("train", "dev", "test"):
            for pair in _read(corpus, split, code):
                assert unicodedata.normalize("NFKC", pair.source) == pair.source
                assert english_of.setdefault(pair.source, pair.english) == pair.english
        assert len(english_of) == _NUM_PAIRS[code] + 200


def _noun_phrases(head, adjective):
    for determiner, is_plural, adjectives in itertools.product(
        ("the", "a"), (False, True), ((), (adjective,), (adjective, "huge"))
    ):
        yield Noun(head, determiner, is_plural, adjectives)
    for adjectives in ((), ("huge",), (adjective, "huge")):
        owner = Noun("friend", "a", True, adjectives)
        yield Noun(head, owner=owner)
        yield Noun(head, "", True, (adjective,), owner)


def _all_small_sentences():
    """Yields every clause over a few words; the two noun phrases also change places."""
    subjects, objects = (
        list(_noun_phrases("witch", "wild")),
        list(_noun_phrases("lizard", "wild")),
    )
    subjects.append(Noun("they"))
    places = [
        ("", None),
        ("in", Noun("forest", "a", False, ("wild",))),
        ("in", Noun("lizard", "the")),
    ]
    for subject, object_, (preposition, place) in itertools.product(subjects, objects, places):
        for tense, is_negated, manner in itertools.product(
            ("present", "past"), (False, True), ("", "slowly")
        ):
            ground = {"preposition": preposition, "place": place}
            yield Clause(subject, "follow", tense, is_negated, object_, manner=manner, **ground)
            yield Clause(object_, "follow", tense, is_negated, subject, manner=manner, **ground)
    for subject, verb in itertools.product(subjects, ("rest", "work")):
        yield Clause(subject, verb, "future", time="soon")


@pytest.mark.slow
def test_no_two_small_sentences_sound_the_same(speakers):
    clauses = list(_all_small_sentences())
    sentences = [Sentence(clause) for clause in clauses]
    sentences += [Sentence(clause, is_question=True) for clause in clauses[::7]]
    sentences += [
        Sentence(first, link, second)
        for link, first, second in zip(
            itertools.cycle(("and", "because")), clauses[::5], clauses[3::5], strict=False
        )
    ]
    translations = list(map(meanings.english, sentences))
    for speaker in speakers.values():
        english_of = {}
        for sentence, english in zip(sentences, translations, strict=True):
            assert english_of.setdefault(speaker.sentence(sentence), english) == english
        assert len(english_of) > 5000


def test_no_english_sentence_is_in_two_splits(corpus):
    keys = {
        split: {
            cleaning.english_key(pair.english)
            for code in _CODES
            for pair in _read(corpus, split, code)
        }
        for split in ("train", "dev", "test")
    }
    assert len(keys["dev"]) == len(keys["test"]) == 100
    for one, other in itertools.combinations(keys.values(), 2):
        assert one.isdisjoint(other)


# Another process's hash seed differs, which would show if the order of a set mattered.


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
def test_another_process_writes_the_same_bytes(corpus, tmp_path):
    command = [sys.executable, "-m", "data_prep.constructed", f"--out={tmp_path}", "--seed=5"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert _digests(tmp_path) == _digests(corpus)


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


def test_related_languages_are_alike_and_differ(speakers):
    drawn = meanings.draw(seed=5, count=50)
    said = {c: [sorted(s.sentence(m).split()) for m in drawn] for c, s in speakers.items()}

    def likeness(one, other):
        return statistics.fmean(
            difflib.SequenceMatcher(None, " ".join(a), " ".join(b)).ratio()
            for a, b in zip(said[one], said[other], strict=True)
        )

    for family in _FAMILIES:
        for one, other in itertools.combinations(family, 2):
            assert 0.5 < likeness(one, other) < 0.99, (one, other)
    for one, other in itertools.combinations([family[0] for family in _FAMILIES], 2):
        assert likeness(one, other) < 0.25, (one, other)
