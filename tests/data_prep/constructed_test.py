import difflib
import hashlib
import itertools
import statistics
import subprocess
import sys
import unicodedata

import pytest

from data_prep import cleaning, constructed, tsv
from data_prep.constructed import Clause, Noun, Sentence

_CODES = constructed.LANGUAGES_BY_SIZE
_FAMILIES = [[language.code for language in family.languages] for family in constructed.FAMILIES]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("constructed")
    constructed.write_corpus(folder, seed=5)
    return folder


@pytest.fixture(scope="module")
def speakers():
    return constructed.speakers(seed=5)


def _read(folder, split, code):
    return list(tsv.read(folder / split / f"{code}-en.tsv.gz"))


def _digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.gz"))
    }


def test_fourteen_languages_of_four_families_have_32000_to_300_pairs(corpus):
    assert sorted(itertools.chain(*_FAMILIES)) == sorted(_CODES)
    assert [len(family) for family in _FAMILIES] == [4, 4, 3, 3]
    counts = [len(_read(corpus, "train", code)) for code in _CODES]
    assert counts == list(constructed.num_pairs().values()) == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (32_000, 300)


def test_a_source_sentence_has_one_english_translation(corpus):
    for code in _CODES:
        english_of = {}
        for split in ("train", "dev", "test"):
            for pair in _read(corpus, split, code):
                assert unicodedata.normalize("NFKC", pair.source) == pair.source
                assert english_of.setdefault(pair.source, pair.english) == pair.english
        assert len(english_of) == constructed.num_pairs()[code] + 200


def _noun_phrases(head, adjective):
    owners = (Noun("boy", "a"), Noun("witch", "the", True, ("big",)))
    for determiner, is_plural, adjectives in itertools.product(
        ("the", "a"), (False, True), ((), (adjective,), (adjective, "big"))
    ):
        yield Noun(head, determiner, is_plural, adjectives)
    for owner in owners[1:]:
        yield Noun(head, owner=owner)
        yield Noun(head, "", True, (adjective,), owner)


def _all_small_sentences():
    """Yields every clause over a few words; the two noun phrases also change places."""
    subjects, objects = list(_noun_phrases("witch", "old")), list(_noun_phrases("cat", "old"))
    subjects.append(Noun("they", is_plural=True))
    places = [("", None), ("in", Noun("forest", "a", False, ("old",))), ("in", Noun("cat", "the"))]
    for subject, object_, (preposition, place) in itertools.product(subjects, objects, places):
        for tense, is_negated, manner in itertools.product(
            ("present", "past"), (False, True), ("", "slowly")
        ):
            ground = {"preposition": preposition, "place": place}
            yield Clause(subject, "see", tense, is_negated, object_, manner=manner, **ground)
            yield Clause(object_, "see", tense, is_negated, subject, manner=manner, **ground)
    for subject, tense, quality in itertools.product(subjects, ("past", "future"), ("big", "old")):
        yield Clause(subject, "be", tense, quality=quality, time="today")


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
    translations = list(map(constructed.english, sentences))
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


def test_another_process_writes_the_same_bytes(corpus, tmp_path):
    # Its hash seed differs, which would show if the order of a set mattered.
    command = [sys.executable, "-m", "data_prep.constructed", f"--out={tmp_path}", "--seed=5"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert _digests(tmp_path) == _digests(corpus)


def test_another_seed_gives_other_words_and_sentences(corpus, speakers):
    drawn = constructed.meanings(seed=6, count=100)
    assert len(set(drawn) & {pair.english for pair in _read(corpus, "dev", "qta")}) < 5
    sentence = next(iter(drawn.values()))
    other = constructed.speakers(seed=6)
    assert all(
        speakers[code].sentence(sentence) != other[code].sentence(sentence) for code in _CODES
    )


def test_related_languages_are_alike_and_differ(speakers):
    meanings = list(constructed.meanings(seed=5, count=50).values())
    said = {c: [sorted(s.sentence(m).split()) for m in meanings] for c, s in speakers.items()}

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


@pytest.mark.parametrize(
    ("sentence", "english"),
    [
        (
            Sentence(Clause(Noun("I"), "be", "present", quality="wise"), is_question=True),
            "Am I wise?",
        ),
        (
            Sentence(
                Clause(Noun("child", "this", True), "say", "past", True),
                "that",
                Clause(
                    Noun("egg", owner=Noun("wife", "my", True, ("old",))),
                    "be",
                    "future",
                    quality="red",
                ),
            ),
            "These children did not say that my old wives' egg will be red.",
        ),
        (
            Sentence(
                Clause(
                    Noun("Nils"),
                    "carry",
                    "present",
                    object=Noun("ant", "a", False, ("ugly",)),
                    preposition="through",
                    place=Noun("forest", "a", True),
                    time="often",
                )
            ),
            "Nils carries an ugly ant through forests often.",
        ),
        (
            Sentence(
                Clause(Noun("bear", "every"), "follow", "past", object=Noun("they", is_plural=True))
            ),
            "Every bear followed them.",
        ),
    ],
)
def test_english_agreement(sentence, english):
    assert constructed.english(sentence) == english
