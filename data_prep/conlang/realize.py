"""A meaning as a sentence of a constructed language.

The English of a sentence is determined by it. Every word has one reading (lexicon.py), and
the parts of a sentence are found again from the words, since

- a noun phrase has one noun, name or pronoun and its other parts stand in a fixed order around it,
- subject and object are apart by the verb between them or by a marked object,
- possessors, attributes and adpositional phrases are marked each in their own way,
- adverbs and particles have fixed places, and two clauses are held apart by a link.
"""

from data_prep.conlang import grammar, meaning
from data_prep.conlang.grammar import UNMARKED, Attach, Marker, Order, Side
from data_prep.conlang.lexicon import Lexicon
from data_prep.conlang.meaning import Link, Number
from data_prep.conlang.words import NUMERALS

_SUBORDINATING = (Link.BECAUSE, Link.THAT)
_OWN_MARKERS = {"the": "definite", "a": "indefinite"}


class Realizer:
    """Speaks one language."""

    def __init__(self, lexicon: Lexicon):
        self._lexicon = lexicon
        self._syntax = lexicon.language.syntax
        self._markers = lexicon.markers

    def sentence(self, what: meaning.Sentence) -> str:
        """Returns the sentence as written."""
        words = self._clause(what.first)
        if what.is_question:
            words = self._around(words, self._markers["question"])
        if what.link is not None and what.second is not None:
            link = [self._lexicon.word(f"link {what.link.value}")]
            second = self._clause(what.second)
            if what.link in _SUBORDINATING and self._syntax.subordinate is Side.BEFORE:
                words = [*second, *link, *words]
            else:
                words = [*words, *link, *second]
        return self._lexicon.language.script.sentence(words, what.is_question)

    def _clause(self, clause: meaning.Clause) -> list[str]:
        subject = self._nominal(clause.subject, ())
        verb = self._verb(clause)
        if clause.predicate_adjective:
            rest = [self._lexicon.word(f"adjective {clause.predicate_adjective}")]
        elif clause.object is not None:
            rest = self._nominal(clause.object, (self._markers["accusative"],))
        else:
            rest = []
        place = self._adposition(clause.place) if clause.place else []
        match self._syntax.order:
            case Order.SVO:
                words = [*subject, *verb, *rest, *place]
            case Order.SOV:
                words = [*subject, *place, *rest, *verb]
            case Order.VSO:
                words = [*verb, *subject, *rest, *place]
            case Order.OVS:
                words = [*rest, *verb, *subject, *place]
        time = [self._lexicon.word(f"adverb {clause.time}")] if clause.time else []
        return _beside(words, time, self._syntax.time)

    def _verb(self, clause: meaning.Clause) -> list[str]:
        negation = self._markers["negation"] if clause.is_negated else UNMARKED
        tense = self._markers[clause.tense.value]
        agreement = self._lexicon.agreement[meaning.person_of(clause.subject)]
        words = [self._lexicon.word(f"verb {clause.verb}", (negation, tense, agreement))]
        for marker in (tense, negation):
            words = self._around(words, marker)
        manner = [self._lexicon.word(f"adverb {clause.manner}")] if clause.manner else []
        return _beside(words, manner, self._syntax.manner)

    def _adposition(self, phrase: meaning.Adposition, attributive: Marker = UNMARKED) -> list[str]:
        marker = self._lexicon.adpositions[phrase.preposition]
        return self._nominal(phrase.nominal, (marker, attributive))

    def _nominal(self, nominal: meaning.Nominal, cases: tuple[Marker, ...]) -> list[str]:
        """A subject, object, possessor or phrase; `cases` from the inside to the outside."""
        if isinstance(nominal, meaning.NounPhrase):
            words = self._noun_phrase(nominal, cases)
        else:
            kind = "pronoun" if isinstance(nominal, meaning.Pronoun) else "name"
            words = [self._lexicon.word(f"{kind} {nominal.name}", cases)]
        for marker in cases:
            words = self._around(words, marker)
        return words

    def _noun_phrase(self, phrase: meaning.NounPhrase, cases: tuple[Marker, ...]) -> list[str]:
        plural = self._plural(phrase)
        definite = self._markers["definite"] if phrase.determiner == "the" else UNMARKED
        noun = self._lexicon.word(f"noun {phrase.noun}", (plural, definite, *cases))
        agreeing = (plural,) if self._syntax.adjective_agrees else ()
        adjectives = [
            self._lexicon.word(f"adjective {name}", agreeing) for name in phrase.adjectives
        ]
        words = self._around(_beside([noun], adjectives, self._syntax.adjective), plural)
        words = _beside(words, self._determiner(phrase.determiner), self._syntax.determiner)
        if phrase.possessor is not None:
            possessor = self._nominal(phrase.possessor, (self._markers["genitive"],))
            words = _beside(words, possessor, self._syntax.genitive)
        if phrase.attribute is not None:
            attribute = self._adposition(phrase.attribute, self._markers["attributive"])
            words = _beside(words, attribute, self._attribute_side())
        return words

    def _attribute_side(self) -> Side:
        is_prepositional = self._lexicon.language.morphology.adposition is Attach.BEFORE
        return Side.AFTER if is_prepositional else Side.BEFORE

    def _plural(self, phrase: meaning.NounPhrase) -> Marker:
        if phrase.number is Number.SINGULAR:
            return UNMARKED
        is_counted = phrase.determiner == "many" or phrase.determiner in NUMERALS
        if self._syntax.prefers_singular and is_counted:
            return UNMARKED
        return self._markers["plural"]

    def _determiner(self, determiner: str) -> list[str]:
        if not determiner:
            return []
        if determiner not in _OWN_MARKERS:
            return [self._lexicon.word(f"determiner {determiner}")]
        marker = self._markers[_OWN_MARKERS[determiner]]
        is_word = marker.attach in (Attach.BEFORE, Attach.AFTER)
        return [self._lexicon.particle(marker)] if is_word else []

    def _around(self, words: list[str], marker: Marker) -> list[str]:
        """Adds a marker that is a word of its own; others are in the words already."""
        match marker.attach:
            case grammar.Attach.BEFORE:
                return [self._lexicon.particle(marker), *words]
            case grammar.Attach.AFTER:
                return [*words, self._lexicon.particle(marker)]
        return words


def _beside(head: list[str], part: list[str], side: Side) -> list[str]:
    return [*part, *head] if side is Side.BEFORE else [*head, *part]
