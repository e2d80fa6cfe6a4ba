"""The concepts that sentences are made of, with their English words.

A concept is named by its English base form. Every other English form is written here or regular.
"""

import dataclasses
import enum


class NounClass(enum.Enum):
    """What verbs choose their subjects and objects by."""

    PERSON = "person"
    ANIMAL = "animal"
    FOOD = "food"
    THING = "thing"
    TEXT = "text"
    PLACE = "place"


class VerbFrame(enum.Enum):
    """What a verb takes besides its subject."""

    INTRANSITIVE = "intransitive"
    TRANSITIVE = "transitive"
    CLAUSE = "clause"


@dataclasses.dataclass(frozen=True)
class Noun:
    """A countable noun."""

    name: str
    plural: str
    noun_class: NounClass


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb; `objects` are the classes that a transitive one takes."""

    name: str
    third_person: str
    past: str
    frame: VerbFrame
    subjects: frozenset[NounClass]
    objects: frozenset[NounClass]


_IRREGULAR_PLURALS = {
    "man": "men",
    "woman": "women",
    "child": "children",
    "wife": "wives",
    "thief": "thieves",
    "mouse": "mice",
    "wolf": "wolves",
    "goose": "geese",
    "ox": "oxen",
    "knife": "knives",
    "loaf": "loaves",
    "leaf": "leaves",
    "shelf": "shelves",
    "potato": "potatoes",
    "tomato": "tomatoes",
}

_NOUNS = {
    NounClass.PERSON: (
        "man woman child boy girl king queen teacher doctor farmer soldier merchant priest judge "
        "thief baker tailor sailor fisher hunter painter singer dancer writer neighbor friend "
        "brother sister mother father uncle aunt son daughter wife husband guest stranger student "
        "servant shepherd poet guard giant"
    ),
    NounClass.ANIMAL: (
        "dog cat horse cow goat pig wolf bear fox lion tiger mouse rabbit bird eagle crow duck "
        "goose hen frog snake turtle spider bee ox donkey camel monkey"
    ),
    NounClass.FOOD: (
        "apple pear plum lemon onion potato tomato carrot loaf cake pie egg sausage nut berry bean "
        "melon cherry"
    ),
    NounClass.THING: (
        "chair table bed lamp candle cup plate knife spoon pot basket box bag rope hammer axe "
        "wheel cart boat ship hat coat shirt shoe ring crown sword shield drum bell clock key door "
        "window mirror blanket stone leaf flower shelf"
    ),
    NounClass.TEXT: "book letter song story poem map newspaper list",
    NounClass.PLACE: (
        "house garden river lake forest field mountain valley village city street bridge market "
        "school church castle tower kitchen cave island beach farm barn road"
    ),
}

_P, _A, _F = NounClass.PERSON, NounClass.ANIMAL, NounClass.FOOD
_T, _X, _L = NounClass.THING, NounClass.TEXT, NounClass.PLACE
_LIVING = frozenset({_P, _A})
_PEOPLE = frozenset({_P})
_GOODS = frozenset({_F, _T, _X})
_ALL = frozenset(NounClass)

# Past forms that are not regular stand behind a slash.
_VERBS: tuple[tuple[VerbFrame, frozenset[NounClass], frozenset[NounClass], str], ...] = (
    (
        VerbFrame.INTRANSITIVE,
        _LIVING,
        frozenset(),
        "sleep/slept run/ran walk jump swim/swam wait fall/fell sit/sat stand/stood rest hide/hid",
    ),
    (
        VerbFrame.INTRANSITIVE,
        _PEOPLE,
        frozenset(),
        "laugh cry dance sing/sang work smile speak/spoke shout kneel/knelt whistle travel",
    ),
    (
        VerbFrame.TRANSITIVE,
        _LIVING,
        _ALL,
        "see/saw find/found watch love fear touch follow guard leave/left like",
    ),
    (VerbFrame.TRANSITIVE, _LIVING, _LIVING, "chase help hear/heard bite/bit meet/met kick"),
    (VerbFrame.TRANSITIVE, _LIVING, frozenset({_F}), "eat/ate smell taste steal/stole"),
    (VerbFrame.TRANSITIVE, _PEOPLE, _LIVING, "call catch/caught feed/fed thank visit teach/taught"),
    (
        VerbFrame.TRANSITIVE,
        _PEOPLE,
        _GOODS,
        "buy/bought sell/sold carry hold/held bring/brought lose/lost want count hate throw/threw",
    ),
    (
        VerbFrame.TRANSITIVE,
        _PEOPLE,
        frozenset({_T}),
        "make/made break/broke repair clean pull push burn lift",
    ),
    (VerbFrame.TRANSITIVE, _PEOPLE, frozenset({_X}), "write/wrote learn copy translate praise"),
    (VerbFrame.TRANSITIVE, _PEOPLE, frozenset({_L}), "build/built enter cross paint describe"),
    (VerbFrame.TRANSITIVE, _PEOPLE, frozenset({_F}), "cook chop/chopped peel"),
    (
        VerbFrame.CLAUSE,
        _PEOPLE,
        frozenset(),
        "say/said think/thought know/knew believe hope remember forget/forgot dream",
    ),
)

_ADJECTIVES = (
    "big small old young good bad happy sad strong weak rich poor clever foolish tall short fat "
    "thin red green blue yellow white black brown clean dirty heavy light hot cold new beautiful "
    "ugly quiet loud kind cruel brave lazy hungry tired strange famous"
)
_MANNER_ADVERBS = (
    "slowly quickly quietly loudly carefully badly gladly secretly bravely together alone"
)
ADJECTIVES = tuple(_ADJECTIVES.split())
MANNER_ADVERBS = tuple(_MANNER_ADVERBS.split())
TIME_ADVERBS_ANY = ("often", "again", "there")
TIME_ADVERBS_BY_TENSE = {
    "present": ("now", "today", "always"),
    "past": ("yesterday", "once", "today"),
    "future": ("tomorrow", "soon", "today"),
}
PREPOSITIONS_OF_PLACE = ("in", "near", "behind", "from", "to", "through")
PREPOSITIONS_OF_THINGS = ("with", "under", "on", "for", "without")
CONJUNCTIONS = ("and", "but", "or")
NAMES = ("Anna", "Tomas", "Nadia", "Pavel", "Mina", "Ivan", "Lora", "Samir")
NUMERALS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
POSSESSIVES = ("my", "your", "his", "her", "our", "their")


def plural_of(noun: str) -> str:
    """The English plural."""
    return _IRREGULAR_PLURALS.get(noun) or _with_s(noun)


def _with_s(word: str) -> str:
    if word.endswith(("s", "sh", "ch", "x", "z")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def _regular_past(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + "ed"


def _inflect_verb(entry: str) -> tuple[str, str, str]:
    base, _, past = entry.partition("/")
    return base, _with_s(base), past or _regular_past(base)


NOUNS = tuple(
    Noun(name, plural_of(name), noun_class)
    for noun_class, names in _NOUNS.items()
    for name in names.split()
)
VERBS = tuple(
    Verb(*_inflect_verb(entry), frame, subjects, objects)
    for frame, subjects, objects, entries in _VERBS
    for entry in entries.split()
)
NOUN_BY_NAME = {noun.name: noun for noun in NOUNS}
VERB_BY_NAME = {verb.name: verb for verb in VERBS}
