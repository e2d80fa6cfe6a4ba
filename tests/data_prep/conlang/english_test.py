import pytest

from data_prep.conlang import english, lexicon, words
from data_prep.conlang.meaning import (
    Adposition,
    Clause,
    Link,
    Name,
    NounPhrase,
    Number,
    Pronoun,
    Sentence,
    Tense,
)

_ONE, _MANY = Number.SINGULAR, Number.PLURAL
_HE, _I, _THEY = Pronoun("he"), Pronoun("I"), Pronoun("they")
_DOG = NounPhrase("dog", _ONE, "the")


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (Sentence(Clause(_DOG, "see", Tense.PRESENT, object=_HE)), "The dog sees him."),
        (Sentence(Clause(_THEY, "see", Tense.PAST, object=_I)), "They saw me."),
        (
            Sentence(Clause(_I, "carry", Tense.PRESENT, True, object=_DOG)),
            "I do not carry the dog.",
        ),
        (Sentence(Clause(_HE, "carry", Tense.PRESENT, object=_DOG)), "He carries the dog."),
        (Sentence(Clause(_HE, "be", Tense.PRESENT, predicate_adjective="old")), "He is old."),
        (Sentence(Clause(_I, "be", Tense.PRESENT, True, "old")), "I am not old."),
        (
            Sentence(Clause(_THEY, "be", Tense.PAST, False, "old"), is_question=True),
            "Were they old?",
        ),
        (
            Sentence(Clause(_DOG, "be", Tense.FUTURE, True, "old"), is_question=True),
            "Will the dog not be old?",
        ),
        (
            Sentence(Clause(_DOG, "bite", Tense.PAST, object=Name("Anna")), is_question=True),
            "Did the dog bite Anna?",
        ),
        (
            Sentence(
                Clause(
                    NounPhrase("man", _MANY, "that", attribute=Adposition("with", _DOG)),
                    "sleep",
                    Tense.PAST,
                    manner="quietly",
                    place=Adposition("in", NounPhrase("house", _ONE, "a", ("old",))),
                    time="yesterday",
                )
            ),
            "Those men with the dog slept quietly in an old house yesterday.",
        ),
        (
            Sentence(
                Clause(NounPhrase("king", _MANY, "a"), "love", Tense.PRESENT, object=Name("Mina")),
                Link.BECAUSE,
                Clause(
                    NounPhrase("son", _ONE, "", possessor=NounPhrase("queen", _MANY, "two")),
                    "be",
                    Tense.PAST,
                    predicate_adjective="brave",
                ),
            ),
            "Kings love Mina because two queens' son was brave.",
        ),
        (
            Sentence(
                Clause(Name("Anna"), "know", Tense.PAST),
                Link.THAT,
                Clause(NounPhrase("horse", _ONE, "", ("big",), Name("Ivan")), "fall", Tense.FUTURE),
            ),
            "Anna knew that Ivan's big horse will fall.",
        ),
    ],
)
def test_sentences_by_hand(sentence, expected):
    assert english.sentence(sentence) == expected


def test_forms_by_hand():
    plurals = {
        "city": "cities",
        "boy": "boys",
        "church": "churches",
        "mouse": "mice",
        "box": "boxes",
    }
    assert {name: words.NOUN_BY_NAME[name].plural for name in plurals} == plurals
    forms = {
        "cry": ("cries", "cried"),
        "catch": ("catches", "caught"),
        "dance": ("dances", "danced"),
        "buy": ("buys", "bought"),
    }
    for name, expected in forms.items():
        verb = words.VERB_BY_NAME[name]
        assert (verb.third_person, verb.past) == expected


def test_every_concept_is_listed_once():
    nouns, verbs = [n.name for n in words.NOUNS], [v.name for v in words.VERBS]
    for names in (nouns, verbs, words.ADJECTIVES, words.MANNER_ADVERBS):
        assert len(set(names)) == len(names)
    assert 330 <= len(list(lexicon.concepts())) <= 400
