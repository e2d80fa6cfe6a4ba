"""Abstract meanings: what a sentence says, in no language. Concepts are named as in words.py."""

import dataclasses
import enum


class Number(enum.Enum):
    SINGULAR = "singular"
    PLURAL = "plural"


class Tense(enum.Enum):
    PRESENT = "present"
    PAST = "past"
    FUTURE = "future"


class Person(enum.Enum):
    """Person and number of a subject, as verbs agree with it. English has one "you"."""

    FIRST_SINGULAR = "1sg"
    SECOND = "2"
    THIRD_SINGULAR = "3sg"
    FIRST_PLURAL = "1pl"
    THIRD_PLURAL = "3pl"


class Link(enum.Enum):
    """How the second clause of a sentence relates to the first."""

    AND = "and"
    BUT = "but"
    OR = "or"
    BECAUSE = "because"
    THAT = "that"


@dataclasses.dataclass(frozen=True)
class Pronoun:
    """ "I", "you", "he", "she", "we" or "they"."""

    name: str


@dataclasses.dataclass(frozen=True)
class Name:
    """A person by name."""

    name: str


@dataclasses.dataclass(frozen=True)
class NounPhrase:
    """A noun with what belongs to it.

    Attributes:
        determiner: "the", "a" (nothing, in an English plural), "this", "that", "every", "many", a
            possessive or a numeral; "" where there is a possessor.
        possessor: has itself neither possessor nor attribute.
        attribute: a prepositional phrase, as in "the man with the dog"; never beside a possessor.
    """

    noun: str
    number: Number
    determiner: str
    adjectives: tuple[str, ...] = ()
    possessor: "NounPhrase | Name | None" = None
    attribute: "Adposition | None" = None


Nominal = Pronoun | Name | NounPhrase


@dataclasses.dataclass(frozen=True)
class Adposition:
    """A preposition and its noun phrase."""

    preposition: str
    nominal: Nominal


@dataclasses.dataclass(frozen=True)
class Clause:
    """A subject and its predicate: a verb, or "be" and an adjective.

    `manner` and `time` are adverbs, "" for none. A verb that takes a clause has it in the sentence.
    """

    subject: Nominal
    verb: str
    tense: Tense
    is_negated: bool = False
    predicate_adjective: str = ""
    object: Nominal | None = None
    manner: str = ""
    place: Adposition | None = None
    time: str = ""


@dataclasses.dataclass(frozen=True)
class Sentence:
    """One clause, a yes-no question of one clause, or two clauses and their link."""

    first: Clause
    link: Link | None = None
    second: Clause | None = None
    is_question: bool = False


_PRONOUN_PERSONS = {
    "I": Person.FIRST_SINGULAR,
    "you": Person.SECOND,
    "he": Person.THIRD_SINGULAR,
    "she": Person.THIRD_SINGULAR,
    "we": Person.FIRST_PLURAL,
    "they": Person.THIRD_PLURAL,
}
PRONOUNS = tuple(_PRONOUN_PERSONS)
DETERMINERS_SINGULAR_ONLY = ("every",)
DETERMINERS_PLURAL_ONLY = ("many",)


def person_of(nominal: Nominal) -> Person:
    """The person and number that a verb agrees with."""
    if isinstance(nominal, Pronoun):
        return _PRONOUN_PERSONS[nominal.name]
    is_plural = isinstance(nominal, NounPhrase) and nominal.number is Number.PLURAL
    return Person.THIRD_PLURAL if is_plural else Person.THIRD_SINGULAR
