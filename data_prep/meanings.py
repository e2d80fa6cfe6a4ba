"""The meanings of constructed sentences, and their expression in English."""

import dataclasses
import pathlib
import random
import tomllib
from collections.abc import Iterable

from data_prep import keys

# The bounds on the words of an English sentence.
_MIN_WORDS = 4
_MAX_WORDS = 16
DATA = tomllib.loads(pathlib.Path(__file__).with_name("constructed.toml").read_text("utf-8"))
WORDS = {kind: words.split() for kind, words in DATA["words"].items()}
NOUN_KINDS = ("being", "food", "thing", "place")
_TENSES = ("present", "past", "past", "future")  # The past is drawn twice as often.
_OBJECT_FORMS = {"I": "me", "he": "him", "she": "her", "we": "us", "they": "them"}


def _add_s(word: str) -> str:
    return word + ("es" if word.endswith(("s", "sh", "ch", "x", "z")) else "s")


@dataclasses.dataclass(frozen=True)
class Noun:
    """A noun phrase, a name or a pronoun; an owner replaces the determiner."""

    head: str
    determiner: str = ""
    is_plural: bool = False
    adjectives: tuple[str, ...] = ()
    owner: "Noun | None" = None


@dataclasses.dataclass(frozen=True)
class Clause:
    """A subject and its predicate."""

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
    """Draws a meaning in which verbs have suitable objects."""
    kind = rng.random()
    if kind < 0.72:
        return Sentence(_clause(rng), is_question=kind < 0.12)

    # "She believes that ...".
    if kind < 0.84:
        report = Clause(
            subject=_noun(rng, "being"),
            verb=rng.choice(WORDS["verb that"]),
            tense=rng.choice(_TENSES),
        )
        return Sentence(report, "that", _clause(rng))

    return Sentence(_clause(rng), rng.choice(WORDS["link"]), _clause(rng))


def _clause(rng: random.Random) -> Clause:
    """Draws a clause. Another order of the draws would produce other corpora."""
    object_kind = rng.choices(("", *NOUN_KINDS), (7, 4, 3, 3, 3))[0]
    tense = rng.choice(_TENSES)
    has_place = rng.random() < 0.35

    # The arguments are drawn in this order, too.
    return Clause(
        subject=_noun(rng, "being"),
        verb=rng.choice(WORDS[f"verb {object_kind}"]),
        tense=tense,
        is_negated=rng.random() < 0.15,
        object=_noun(rng, object_kind) if object_kind else None,
        manner=rng.choice(WORDS["manner"]) if rng.random() < 0.2 else "",
        preposition=rng.choice(WORDS["preposition"]) if has_place else "",
        place=_noun(rng, "place") if has_place else None,
        time=rng.choice(WORDS[tense]) if rng.random() < 0.2 else "",
    )


def _noun(rng: random.Random, kind: str) -> Noun:
    """Draws a noun phrase of one of NOUN_KINDS."""
    if kind == "being" and rng.random() < 0.2:
        word_class = "pronoun" if rng.random() < 0.6 else "name"
        return Noun(rng.choice(WORDS[word_class]))

    is_plural = rng.random() < 0.3
    num_adjectives = rng.choices((0, 1, 2), (55, 37, 8))[0]
    adjectives = tuple(rng.sample(WORDS["adjective"], num_adjectives))
    owner = _noun(rng, "being") if rng.random() < 0.12 else None
    # A pronoun cannot be the owner: possessives take its place.
    if owner and owner.head not in WORDS["pronoun"]:
        return Noun(rng.choice(WORDS[kind]), "", is_plural, adjectives, owner)

    counts = WORDS["count"] if is_plural else ["every"]
    determiner_classes = (["the"], ["a"], ["this"], WORDS["possessive"], counts)
    determiners = rng.choices(determiner_classes, (50, 22, 10, 10, 8))[0]
    determiner = rng.choice(determiners)
    return Noun(rng.choice(WORDS[kind]), determiner, is_plural, adjectives)


def english(sentence: Sentence) -> str:
    """Returns the English sentence."""
    words = _english_clause(sentence.first, sentence.is_question)
    if sentence.second:
        words += [sentence.link, *_english_clause(sentence.second)]
    return finish(words, sentence.is_question)


def finish(words: Iterable[str], is_question: bool) -> str:
    """Returns the written sentence for some words, skipping empty ones."""
    text = " ".join(filter(None, words))
    return text[0].upper() + text[1:] + ("?" if is_question else ".")


def _english_clause(clause: Clause, is_question: bool = False) -> list[str]:
    subject = _english_noun(clause.subject)
    finite, *others = _english_verb(clause, is_question)
    words = [*subject, finite, *others]
    if is_question:
        words = [finite, *subject, *others]

    if clause.object:
        words += [_OBJECT_FORMS.get(word, word) for word in _english_noun(clause.object)]
    place = _english_noun(clause.place) if clause.place else []
    return [*words, clause.manner, clause.preposition, *place, clause.time]


def _english_verb(clause: Clause, is_question: bool) -> list[str]:
    """Returns the finite verb or auxiliary, then "not", then the rest."""
    negation = ["not"] if clause.is_negated else []
    subject = clause.subject
    is_third_singular = not subject.is_plural and subject.head not in ("I", "you", "we", "they")
    if clause.tense == "future":
        return ["will", *negation, clause.verb]

    # Negations and questions need an auxiliary.
    if negation or is_question:
        if clause.tense == "past":
            auxiliary = "did"
        elif is_third_singular:
            auxiliary = "does"
        else:
            auxiliary = "do"
        return [auxiliary, *negation, clause.verb]

    if clause.tense == "past":
        return [clause.verb.removesuffix("e") + "ed"]
    return [_add_s(clause.verb) if is_third_singular else clause.verb]


def _english_noun(noun: Noun) -> list[str]:
    """Returns a noun phrase, whose first word may be empty."""
    head = _add_s(noun.head) if noun.is_plural else noun.head
    words = [*noun.adjectives, head]

    # "My young cousins' artist": the owner replaces the determiner.
    if noun.owner:
        *others, last = _english_noun(noun.owner)
        suffix = "'" if noun.owner.is_plural else "'s"
        return [*others, last + suffix, *words]

    # Articles agree in number, and "a" with the next sound.
    determiner = noun.determiner
    if noun.is_plural:
        determiner = {"a": "", "this": "these"}.get(determiner, determiner)
    elif determiner == "a" and words[0][0] in "aeiou":
        determiner = "an"
    return [determiner, *words]


def draw(seed: int, count: int) -> list[Sentence]:
    """Draws `count` meanings; no two differ in English only by case or punctuation."""
    rng = random.Random(f"{seed} meanings")
    drawn: dict[str, Sentence] = {}
    while len(drawn) < count:
        sentence = _sentence(rng)
        # Sentences that were drawn before, or are too short or too long, are skipped.
        text = english(sentence)
        if _MIN_WORDS <= len(text.split()) <= _MAX_WORDS:
            drawn.setdefault(keys.english(text), sentence)
    return list(drawn.values())
