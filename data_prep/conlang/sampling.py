"""Drawing random meanings: who does what to whom, as the classes of words.py allow."""

import random
from collections.abc import Sequence

from data_prep.conlang import meaning, words
from data_prep.conlang.meaning import Link, Number, Tense
from data_prep.conlang.words import NounClass, Verb, VerbFrame

_LINKS = (Link.AND, Link.BUT, Link.OR, Link.BECAUSE)
_TENSES = (Tense.PRESENT, Tense.PAST, Tense.PAST, Tense.FUTURE)


class MeaningSampler:
    """Draws meanings from one random stream."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._nouns = {
            noun_class: tuple(n.name for n in words.NOUNS if n.noun_class is noun_class)
            for noun_class in NounClass
        }
        self._verbs = {
            frame: tuple(v for v in words.VERBS if v.frame is frame) for frame in VerbFrame
        }

    def sentence(self) -> meaning.Sentence:
        """Draws a sentence."""
        kind = self._rng.random()
        if kind < 0.60:
            return meaning.Sentence(self._clause())
        if kind < 0.72:
            return meaning.Sentence(self._clause(), is_question=True)
        if kind < 0.84:
            return meaning.Sentence(
                self._reporting_clause(), Link.THAT, self._clause(is_short=True)
            )
        return meaning.Sentence(
            self._clause(is_short=True), self._rng.choice(_LINKS), self._clause(is_short=True)
        )

    def _clause(self, is_short: bool = False) -> meaning.Clause:
        if self._chance(0.15):
            return self._description()
        is_transitive = self._chance(0.65)
        frame = VerbFrame.TRANSITIVE if is_transitive else VerbFrame.INTRANSITIVE
        verb = self._rng.choice(self._verbs[frame])
        tense = self._rng.choice(_TENSES)
        return meaning.Clause(
            subject=self._nominal(verb.subjects, depth=0 if is_short else 1),
            verb=verb.name,
            tense=tense,
            is_negated=self._chance(0.15),
            object=self._object(verb, depth=0 if is_short else 1) if is_transitive else None,
            manner=self._maybe(0.2, words.MANNER_ADVERBS),
            place=self._place() if self._chance(0.1 if is_short else 0.3) else None,
            time=self._time(tense) if self._chance(0.2) else "",
        )

    def _description(self) -> meaning.Clause:
        tense = self._rng.choice(_TENSES)
        return meaning.Clause(
            subject=self._nominal(frozenset(NounClass), depth=1),
            verb="be",
            tense=tense,
            is_negated=self._chance(0.2),
            predicate_adjective=self._rng.choice(words.ADJECTIVES),
            time=self._time(tense) if self._chance(0.15) else "",
        )

    def _reporting_clause(self) -> meaning.Clause:
        verb = self._rng.choice(self._verbs[VerbFrame.CLAUSE])
        return meaning.Clause(
            subject=self._nominal(verb.subjects, depth=0),
            verb=verb.name,
            tense=self._rng.choice(_TENSES),
            is_negated=self._chance(0.15),
        )

    def _object(self, verb: Verb, depth: int) -> meaning.Nominal:
        return self._nominal(verb.objects, depth)

    def _nominal(self, classes: frozenset[NounClass], depth: int) -> meaning.Nominal:
        if NounClass.PERSON in classes:
            kind = self._rng.random()
            if kind < 0.15:
                return meaning.Pronoun(self._rng.choice(meaning.PRONOUNS))
            if kind < 0.22:
                return meaning.Name(self._rng.choice(words.NAMES))
        return self._noun_phrase(classes, depth)

    def _noun_phrase(self, classes: frozenset[NounClass], depth: int) -> meaning.NounPhrase:
        # Sets have no order of their own that is the same in every run.
        noun_class = self._rng.choice(sorted(classes, key=lambda c: c.value))
        number = Number.PLURAL if self._chance(0.3) else Number.SINGULAR
        possessor = self._possessor() if depth and self._chance(0.12) else None
        attribute = None
        if depth and possessor is None and self._chance(0.12):
            attribute = self._place()
        return meaning.NounPhrase(
            noun=self._rng.choice(self._nouns[noun_class]),
            number=number,
            determiner="" if possessor else self._determiner(number),
            adjectives=self._adjectives(),
            possessor=possessor,
            attribute=attribute,
        )

    def _possessor(self) -> meaning.NounPhrase | meaning.Name:
        if self._chance(0.25):
            return meaning.Name(self._rng.choice(words.NAMES))
        return self._noun_phrase(frozenset({NounClass.PERSON, NounClass.ANIMAL}), depth=0)

    def _place(self) -> meaning.Adposition:
        if self._chance(0.6):
            preposition = self._rng.choice(words.PREPOSITIONS_OF_PLACE)
            classes = frozenset({NounClass.PLACE})
        else:
            preposition = self._rng.choice(words.PREPOSITIONS_OF_THINGS)
            classes = frozenset({NounClass.THING})
        return meaning.Adposition(preposition, self._noun_phrase(classes, depth=0))

    def _determiner(self, number: Number) -> str:
        kind = self._rng.random()
        if kind < 0.50:
            return "the"
        if kind < 0.72:
            return "a"
        if kind < 0.82:
            return self._rng.choice(("this", "that"))
        if kind < 0.92:
            return self._rng.choice(words.POSSESSIVES)
        return self._rng.choice(("many", *words.NUMERALS)) if number is Number.PLURAL else "every"

    def _adjectives(self) -> tuple[str, ...]:
        count = self._rng.choices((0, 1, 2), (0.55, 0.37, 0.08))[0]
        return tuple(self._rng.sample(words.ADJECTIVES, count))

    def _time(self, tense: Tense) -> str:
        return self._rng.choice(words.TIME_ADVERBS_ANY + words.TIME_ADVERBS_BY_TENSE[tense.value])

    def _maybe(self, probability: float, choices: Sequence[str]) -> str:
        return self._rng.choice(choices) if self._chance(probability) else ""

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability
