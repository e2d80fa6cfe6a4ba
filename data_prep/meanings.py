"""The meanings of constructed sentences, and how they are expressed in English."""

import dataclasses
import pathlib
import random
import tomllib
from collections.abc import Iterable

from data_prep import cleaning

_MIN_WORDS, _MAX_WORDS = 4, 16
DATA = tomllib.loads(pathlib.Path(__file__).with_name("constructed.toml").read_text("utf-8"))
WORDS = {kind: words.split() for kind, words in DATA["words"].items()}
NOUN_KINDS = ("being", "food", "thing", "place")
_TENSES = ("present", "past", "past", "future")  # The past is drawn twice as often.
_OBJECT_FORMS = {"I": "me", "he": "him", "she": "her", "we": "us", "they": "them"}


def _add_s(word: str) -> str:
    return word + ("es" if word.endswith(("s", "sh", "ch", "x", "z")) else "s")


@dataclasses.dataclass(frozen=True)
class Noun:
    """A noun phrase, a name or a pronoun; an owner takes the place of the determiner."""

    head: str
    determiner: str = ""
    is_plural: bool = False
    adjectives: tuple[str, ...] = ()
    owner: "Noun | None" = None


@dataclasses.dataclass(frozen=True)
class Clause:
    """A subject and what is said of it."""

    subject: Noun
    verb: str
    tense: str
    is_negated: bool = False
    object: Noun | None = None
    manner: str = ""
    preposition: str = ""
    place: Noun | None = None
    time: str = ""


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A statement, a question, or two statements with a link."""

    first: Clause
    link: str = ""
    second: Clause | None = None
    is_question: bool = False


def _sentence(rng: random.Random) -> Sentence:
    """Draws a meaning in which verbs have objects that suit them."""
    kind = rng.random()
    if kind < 0.72:
        return Sentence(_clause(rng), is_question=kind < 0.12)
    if kind < 0.84:
        report = Clause(_noun(rng, "being"), rng.choice(WORDS["verb that"]), rng.choice(_TENSES))
        return Sentence(report, "that", _clause(rng))
    return Sentence(_clause(rng), rng.choice(WORDS["link"]), _clause(rng))


def _clause(rng: random.Random) -> Clause:
    kind = rng.choices(("", *NOUN_KINDS), (7, 4, 3, 3, 3))[0]
    tense, has_place = rng.choice(_TENSES), rng.random() < 0.35
    return Clause(
        subject=_noun(rng, "being"),
        verb=rng.choice(WORDS[f"verb {kind}"]),
        tense=tense,
        is_negated=rng.random() < 0.15,
        object=_noun(rng, kind) if kind else None,
        manner=rng.choice(WORDS["manner"]) if rng.random() < 0.2 else "",
        preposition=rng.choice(WORDS["preposition"]) if has_place else "",
        place=_noun(rng, "place") if has_place else None,
        time=rng.choice(WORDS[tense]) if rng.random() < 0.2 else "",
    )


def _noun(rng: random.Random, kind: str) -> Noun:
    if kind == "being" and rng.random() < 0.2:
        return Noun(rng.choice(WORDS["pronoun" if rng.random() < 0.6 else "name"]))
    is_plural = rng.random() < 0.3
    count = rng.choices((0, 1, 2), (55, 37, 8))[0]
    adjectives = tuple(rng.sample(WORDS["adjective"], count))
    owner = _noun(rng, "being") if rng.random() < 0.12 else None
    if owner and owner.head not in WORDS["pronoun"]:
        return Noun(rng.choice(WORDS[kind]), "", is_plural, adjectives, owner)
    counts = WORDS["count"] if is_plural else ["every"]
    determiners = (["the"], ["a"], ["this"], WORDS["possessive"], counts)
    determiner = rng.choice(rng.choices(determiners, (50, 22, 10, 10, 8))[0])
    return Noun(rng.choice(WORDS[kind]), determiner, is_plural, adjectives)


def english(sentence: Sentence) -> str:
    """Returns the English sentence."""
    words = _english_clause(sentence.first, sentence.is_question)
    if sentence.second:
        words += [sentence.link, *_english_clause(sentence.second)]
    return finish(words, sentence.is_question)


def finish(words: Iterable[str], is_question: bool) -> str:
    """Returns a written sentence of some words, without the empty ones."""
    text = " ".join(filter(None, words))
    return text[0].upper() + text[1:] + ("?" if is_question else ".")


def _english_clause(clause: Clause, is_question: bool = False) -> list[str]:
    subject, (finite, *others) = _english_noun(clause.subject), _english_verb(clause, is_question)
    words = [finite, *subject, *others] if is_question else [*subject, finite, *others]
    if clause.object:
        words += [_OBJECT_FORMS.get(word, word) for word in _english_noun(clause.object)]
    place = _english_noun(clause.place) if clause.place else []
    return [*words, clause.manner, clause.preposition, *place, clause.time]


def _english_verb(clause: Clause, is_question: bool) -> list[str]:
    """Returns the finite verb or auxiliary, then "not", then the rest."""
    negation = ["not"] if clause.is_negated else []
    has_s = not clause.subject.is_plural and clause.subject.head not in ("I", "you", "we", "they")
    if clause.tense == "future":
        return ["will", *negation, clause.verb]
    if negation or is_question:
        auxiliary = "did" if clause.tense == "past" else "does" if has_s else "do"
        return [auxiliary, *negation, clause.verb]
    if clause.tense == "past":
        return [clause.verb.removesuffix("e") + "ed"]
    return [_add_s(clause.verb) if has_s else clause.verb]


def _english_noun(noun: Noun) -> list[str]:
    words = [*noun.adjectives, _add_s(noun.head) if noun.is_plural else noun.head]
    if noun.owner:
        *others, last = _english_noun(noun.owner)
        return [*others, last + ("'" if noun.owner.is_plural else "'s"), *words]
    determiner = noun.determiner
    if determiner == "a":
        determiner = "" if noun.is_plural else "an" if words[0][0] in "aeiou" else "a"
    elif determiner == "this" and noun.is_plural:
        determiner = "these"
    return [determiner, *words]


def draw(seed: int, count: int) -> list[Sentence]:
    """Draws `count` meanings; the English of no two differs only in case or punctuation."""
    rng = random.Random(f"{seed} meanings")
    drawn: dict[str, Sentence] = {}
    while len(drawn) < count:
        sentence = _sentence(rng)
        text = english(sentence)
        if _MIN_WORDS <= len(text.split()) <= _MAX_WORDS:
            drawn.setdefault(cleaning.english_key(text), sentence)
    return list(drawn.values())
