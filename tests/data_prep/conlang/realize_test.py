import collections
import dataclasses
import itertools

import pytest

from data_prep.conlang import english, families, grammar, lexicon, phonology, realize, scripts
from data_prep.conlang.grammar import Attach, Side
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


@pytest.fixture(scope="module")
def lexicons():
    made = [words for family in families.FAMILIES for words in lexicon.build(family, seed=9)]
    return {words.language.code: words for words in made}


def test_every_written_word_has_one_reading(lexicons):
    for words in lexicons.values():
        seen = {}
        for concept in lexicon.concepts():
            forms = words.readings(concept)
            assert forms, concept
            for form, reading in forms.items():
                assert seen.setdefault(form, reading) == reading, (words.language.code, form)


def _close_meanings():
    """Meanings that differ in one thing each, built to be confused: every part where it can be."""
    house = NounPhrase("house", _ONE, "the")
    nominals = [
        Pronoun("he"),
        Pronoun("she"),
        Name("Anna"),
        *(NounPhrase("dog", n, d) for n in Number for d in ("the", "a", "this", "that", "my")),
        NounPhrase("dog", _ONE, "every"),
        NounPhrase("dog", _MANY, "many"),
        NounPhrase("dog", _MANY, "two"),
        NounPhrase("dog", _ONE, "the", ("big",)),
        NounPhrase("dog", _ONE, "the", ("big", "old")),
        NounPhrase("dog", _ONE, "the", ("old", "big")),
        NounPhrase("dog", _ONE, "", possessor=Name("Anna")),
        NounPhrase("dog", _ONE, "", ("old",), NounPhrase("king", _ONE, "the")),
        NounPhrase("dog", _ONE, "", (), NounPhrase("king", _ONE, "the", ("old",))),
        NounPhrase("dog", _MANY, "", (), NounPhrase("king", _ONE, "the")),
        NounPhrase("dog", _ONE, "", (), NounPhrase("king", _MANY, "the")),
        NounPhrase("dog", _ONE, "the", attribute=Adposition("in", house)),
        NounPhrase("dog", _ONE, "the", attribute=Adposition("near", house)),
    ]
    places = [None, Adposition("in", house), Adposition("in", NounPhrase("house", _MANY, "a"))]
    for subject, thing, place in itertools.product(nominals, nominals, places):
        yield Sentence(Clause(subject, "see", Tense.PAST, object=thing, place=place))
    adverbs = itertools.product(("", "quietly"), ("", "today"), Tense, (False, True))
    for manner, time, tense, negated in adverbs:
        for subject, place in itertools.product(nominals, places):
            clause = Clause(subject, "sleep", tense, negated, manner=manner, place=place, time=time)
            yield Sentence(clause)
            yield Sentence(clause, is_question=True)
        for subject in nominals:
            yield Sentence(Clause(subject, "be", tense, negated, "old", time=time))
    for first, second, link in itertools.product(nominals[:12], nominals[:12], Link):
        verb = "know" if link is Link.THAT else "sleep"
        yield Sentence(
            Clause(first, verb, Tense.PAST),
            link,
            Clause(second, "see", Tense.PRESENT, object=first, time="today"),
        )


def test_meanings_that_differ_little_differ_in_every_language(lexicons):
    meanings = list(_close_meanings())
    assert len(meanings) > 5000
    for words in lexicons.values():
        realizer = realize.Realizer(words)
        english_of = collections.defaultdict(set)
        for meaning in meanings:
            english_of[realizer.sentence(meaning)].add(english.sentence(meaning))
        shared = {source: texts for source, texts in english_of.items() if len(texts) > 1}
        assert not shared, (words.language.code, next(iter(shared.items())))


def test_a_homonym_would_be_found(lexicons):
    """The check above can fail: with two equal words it does."""
    words = lexicons["qta"]
    roots = {**words.roots, "determiner this": words.roots["determiner that"]}
    realizer = realize.Realizer(dataclasses.replace(words, roots=roots))
    clauses = [
        Sentence(Clause(NounPhrase("dog", _ONE, determiner), "sleep", Tense.PAST))
        for determiner in ("this", "that")
    ]
    assert realizer.sentence(clauses[0]) == realizer.sentence(clauses[1])


def _toy(**syntax):
    """A language whose words are set by hand."""
    language = families.LOPAI.languages[0]
    language = dataclasses.replace(
        language,
        script=scripts.LATIN_DIGRAPHS,
        syntax=dataclasses.replace(language.syntax, **syntax),
        morphology=dataclasses.replace(language.morphology, indefinite=Attach.BEFORE),
    )
    unmarked = {category: grammar.UNMARKED for category in grammar.MARKED_CATEGORIES}
    markers = {
        **unmarked,
        "plural": grammar.Marker(Attach.SUFFIX, "lAr"),
        "indefinite": grammar.Marker(Attach.BEFORE, "un"),
        "genitive": grammar.Marker(Attach.AFTER, "ge"),
        "past": grammar.Marker(Attach.PREFIX, "pa"),
        "question": grammar.Marker(Attach.AFTER, "Ce"),
    }
    roots = {
        "noun dog": "kelu",
        "noun king": "Safi",
        "verb see": "ren",
        "adjective big": "oko",
        "adverb today": "tod",
        "link that": "zu",
        "verb know": "vit",
    }
    agreement = dict.fromkeys(families.LOPAI.agreement, grammar.UNMARKED)
    return realize.Realizer(lexicon.Lexicon(language, roots, markers, agreement, {}))


def test_word_order_and_marking_by_hand():
    dogs = NounPhrase("dog", _MANY, "the", ("big",))
    king = NounPhrase("king", _MANY, "a")
    seen = Clause(dogs, "see", Tense.PAST, object=king, time="today")
    assert _toy().sentence(Sentence(seen)) == "Tod kelular oko paren shafiler un."
    assert (
        _toy(
            adjective=Side.BEFORE, determiner=Side.BEFORE, time=Side.AFTER, order=grammar.Order.OVS
        ).sentence(Sentence(seen, is_question=True))
        == "Un shafiler paren oko kelular tod che?"
    )
    owned = NounPhrase("dog", _ONE, "", possessor=NounPhrase("king", _ONE, "the"))
    knows = Sentence(
        Clause(owned, "know", Tense.PRESENT),
        Link.THAT,
        Clause(dogs, "see", Tense.PAST, object=owned),
    )
    assert _toy().sentence(knows) == "Shafi ge kelu vit zu kelular oko paren shafi ge kelu."
    assert (
        _toy(subordinate=Side.BEFORE, genitive=Side.AFTER).sentence(knows)
        == "Kelular oko paren kelu shafi ge zu kelu shafi ge vit."
    )


def test_sound_changes_apply_in_order():
    changes = phonology.SoundChanges((("k(?=[ei])", "C"), ("[aeiou]$", ""), ("C$", "S")))
    assert changes.apply("kaleki") == "kaleS"
    assert phonology.harmonize("kolAr") == "kolar"
    assert phonology.harmonize("kelArA") == "kelere"


def test_abugida_by_hand():
    write = scripts.DEVANAGARI.write
    assert write("ka") == "क"
    assert write("kita") == "कित"
    assert write("atka") == "अत्क"
    assert write("lon") == "लोन्"
    assert write("ai") == "अइ"


def test_relatives_share_more_than_strangers(lexicons):
    """Cognates: equal first sounds after the sound changes, within a family and across."""

    def share(one, other):
        nouns = [c for c in lexicon.concepts() if c.startswith("noun")]
        pairs = [(lexicons[one].roots[c], lexicons[other].roots[c]) for c in nouns]
        return sum(a[1:3] == b[1:3] for a, b in pairs) / len(pairs)

    assert share("qta", "qtd") > 0.5
    assert share("qta", "qoa") < 0.1


def test_an_ambiguous_grammar_is_refused():
    sov = families.ORUK.languages[0]
    with pytest.raises(ValueError, match=r"qoa: SOV needs a marked accusative"):
        dataclasses.replace(
            sov, morphology=dataclasses.replace(sov.morphology, accusative=Attach.NONE)
        )
    with pytest.raises(ValueError, match=r"definite and indefinite are both unmarked"):
        dataclasses.replace(sov.morphology, indefinite=Attach.NONE)
