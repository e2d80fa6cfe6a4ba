"""Writes a many-to-English corpus of constructed languages.

    python -m data_prep.constructed --out=TEXT_DIR --seed=1
    python -m data_prep.build --input=TEXT_DIR --out=DATA_DIR

Each sentence is drawn as a meaning and then expressed in English and in fourteen languages of four
families. The languages of a family share a script, roots and grammatical markers; each has its own
sound changes and word order. Every source sentence has exactly one English translation, so a model
can reach 100 BLEU. Training sizes fall geometrically from 32,000 pairs to 300. All languages share
their dev and test sentences, which don't occur in training. The files depend on the seed alone.
"""

import dataclasses
import pathlib
import random
import re
from collections.abc import Iterable

from absl import flags, logging

from data_prep import cleaning, tsv
from lingvo_gshard import cli

_NUM_MEANINGS = 40_000
_NUM_HELD_OUT = 100
_MIN_WORDS, _MAX_WORDS = 4, 16

# English words by class. Nouns and verbs are regular, and none ends in a consonant and y.
_LEXICON = {
    "being": """actor artist aunt baker beaver captain carpenter chicken cousin crocodile dentist
        dolphin driver eagle elephant engineer falcon farmer friend gardener giant guide horse
        inventor kitten lizard lobster mayor monkey neighbor officer parrot penguin pigeon pilot
        plumber prince princess rabbit sailor scientist singer squirrel teacher tiger tourist turtle
        waiter whale witch wizard""",
    "food": """apple banana biscuit carrot coconut cookie cucumber lemon mushroom pancake peach
        pumpkin sandwich sausage walnut""",
    "thing": """anchor barrel bottle bucket button camera candle carpet chair compass curtain
        feather guitar hammer helmet jacket ladder lantern letter magazine mirror necklace needle
        pencil piano pillow shirt shovel statue table telescope trumpet umbrella violin wagon""",
    "place": """bridge canal castle cellar cottage desert forest garden harbor hospital house island
        market meadow mountain museum orchard palace prison river school stadium station temple
        theater tunnel village""",
    "name": "Elena Greta Nils Omar Pedro Ravi Sofia Yuri",
    "adjective": """ancient brave bright brown calm clever famous gentle green heavy huge kind large
        lonely modern narrow nervous noisy patient pink polite poor proud purple rare rough silent
        small soft strange strong tall tired white wild yellow young""",
    # Verbs by their objects.
    "verb ": "complain dance jump laugh pause rest smile sneeze snore tremble wander whistle work",
    "verb being": "annoy avoid chase follow greet kick notice rescue surprise thank visit watch",
    "verb food": "boil cook devour peel roast slice smell swallow taste",
    "verb thing": "borrow clean collect count destroy lift polish push repair touch want",
    "verb place": "approach cross describe discover enter explore paint remember",
    "verb that": "believe claim doubt dream explain hope learn pretend",
    "manner": "slowly quickly quietly badly happily secretly alone together politely suddenly",
    "present": "now today always often",
    "past": "yesterday once recently",
    "future": "tomorrow soon later",
    "preposition": "in near behind from to through under",
    "possessive": "my your his her our their",
    "count": "many two three four five six seven eight nine ten",
    "link": "and but or because",
    "pronoun": "I you he she we they",
    "other": "the this every that question",
}
_WORDS = {kind: words.split() for kind, words in _LEXICON.items()}
_NOUN_KINDS = ("being", "food", "thing", "place")
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
        report = Clause(_noun(rng, "being"), rng.choice(_WORDS["verb that"]), rng.choice(_TENSES))
        return Sentence(report, "that", _clause(rng))
    return Sentence(_clause(rng), rng.choice(_WORDS["link"]), _clause(rng))


def _clause(rng: random.Random) -> Clause:
    kind = rng.choices(("", *_NOUN_KINDS), (7, 4, 3, 3, 3))[0]
    tense, has_place = rng.choice(_TENSES), rng.random() < 0.35
    return Clause(
        subject=_noun(rng, "being"),
        verb=rng.choice(_WORDS[f"verb {kind}"]),
        tense=tense,
        is_negated=rng.random() < 0.15,
        object=_noun(rng, kind) if kind else None,
        manner=rng.choice(_WORDS["manner"]) if rng.random() < 0.2 else "",
        preposition=rng.choice(_WORDS["preposition"]) if has_place else "",
        place=_noun(rng, "place") if has_place else None,
        time=rng.choice(_WORDS[tense]) if rng.random() < 0.2 else "",
    )


def _noun(rng: random.Random, kind: str) -> Noun:
    if kind == "being" and rng.random() < 0.2:
        return Noun(rng.choice(_WORDS["pronoun" if rng.random() < 0.6 else "name"]))
    is_plural = rng.random() < 0.3
    count = rng.choices((0, 1, 2), (55, 37, 8))[0]
    adjectives = tuple(rng.sample(_WORDS["adjective"], count))
    owner = _noun(rng, "being") if rng.random() < 0.12 else None
    if owner and owner.head not in _WORDS["pronoun"]:
        return Noun(rng.choice(_WORDS[kind]), "", is_plural, adjectives, owner)
    counts = _WORDS["count"] if is_plural else ["every"]
    determiners = (["the"], ["a"], ["this"], _WORDS["possessive"], counts)
    determiner = rng.choice(rng.choices(determiners, (50, 22, 10, 10, 8))[0])
    return Noun(rng.choice(_WORDS[kind]), determiner, is_plural, adjectives)


def english(sentence: Sentence) -> str:
    """Returns the English sentence."""
    words = _english_clause(sentence.first, sentence.is_question)
    if sentence.second:
        words += [sentence.link, *_english_clause(sentence.second)]
    return _finish(words, sentence.is_question)


def _finish(words: Iterable[str], is_question: bool) -> str:
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


_VOWELS = "aeiou"
_SOUNDS = _VOWELS + "pbtdkgmnszSZCNxlrhwyfv"  # S sh, Z zh, C ch, N ng.
_MARKERS = ("plural", "object", "owner", "past", "future", "not")


@dataclasses.dataclass(frozen=True)
class Family:
    """What related languages share."""

    letters: str  # The script, in the order of the sounds.
    onsets: str  # The consonants that a syllable begins with.
    codas: str  # Those that it ends with; half of the syllables or more have none.
    affixes: str  # In the order of _MARKERS.
    has_prefixes: bool = False  # Affixes, prepositions and the question word come first, not last.

    def root(self, rng: random.Random, is_short: bool) -> str:
        """Draws the root of a word."""
        return "".join(
            rng.choice(self.onsets) + rng.choice(_VOWELS) + rng.choice(["", "", *self.codas])
            for _ in range(rng.choice((1, 2) if is_short else (2, 2, 3)))
        )


@dataclasses.dataclass(frozen=True)
class Language:
    """What sets a language apart from its relatives."""

    code: str  # One of those that ISO 639-3 reserves for private use.
    family: Family
    num_pairs: int  # Of training text.
    order: str  # Of Subject, Object, Verb, Manner, Place and Time.
    noun_order: str  # Of Determiner, Adjectives, Noun and owner (Genitive).
    # The sound changes that every word went through, in order: "pattern>replacement". V is a vowel.
    changes: str


_LATIN, _ARMENIAN, _TIFINAGH, _CYRILLIC = FAMILIES = (
    Family("aeioupbtdkgmnszšžčñxlrhwyfv", "ptkbdgmnslrv", "nrls", "kes mu nis da vor nen"),
    Family("աեիոըպբտդկգմնսզշժչղխլրհւյֆվ", "kgtdbmnsyrlCS", "knrz", "lar mun nax dug Cak mas"),
    Family("ⴰⴻⵉⵄⵓⵒⴱⵜⴷⴽⴳⵎⵏⵙⵣⵛⵊⵞⵖⵅⵍⵔⵀⵡⵢⴼⵠ", "ShnmrltdkbfxwC", "mlSt", "wi te Sel kan sof lof", True),
    Family(
        "аеиоупбтдкгмнсзшжчңхлрһўйфв", "ptkmnlhwysCN", "nN", "mena koi noN tele kamai pohu", True
    ),
)
# From the largest to the smallest, so that every family has large and small languages.
LANGUAGES = (
    Language("qta", _LATIN, 32_000, "SVMOPT", "DANG", "k(?=[ei])>C s(?=i)>S"),
    Language("qoa", _ARMENIAN, 22_343, "TSPOMV", "DGAN", "k(?=[ei])>x"),
    Language("qsa", _TIFINAGH, 15_601, "VMSOPT", "DNAG", "(?<=V)h>x t(?=m)>n"),
    Language("qla", _CYRILLIC, 10_893, "TSVMOP", "GNAD", "t(?=i)>C"),
    Language("qtb", _LATIN, 7_606, "SVMOPT", "DNAG", "p(?=V)>f t(?=V)>d o>u"),
    Language("qob", _ARMENIAN, 5_311, "TSPOMV", "DGNA", "^k>x g>w z(?=V)>s"),
    Language("qlb", _CYRILLIC, 3_708, "TSVMOP", "DGAN", "p>b k(?=[ou])>g w>v"),
    Language("qsb", _TIFINAGH, 2_589, "TVMSOP", "NADG", "x>k f>p a(?=[mn])>o"),
    Language("qtc", _LATIN, 1_808, "TSOMVP", "DANG", "(?<=V)k(?=V)>g e(?=[nr])>ya"),
    Language("qoc", _ARMENIAN, 1_262, "SPOMVT", "DGAN", "C>Z u>o (?<=V)b>v"),
    Language("qlc", _CYRILLIC, 881, "TSPOMV", "GNAD", "(?<=V)t>d s>S e(?=N)>i"),
    Language("qsc", _TIFINAGH, 615, "SVMOPT", "DNAG", "S>s t(?=[iu])>C (?<=V)d>z"),
    Language("qtd", _LATIN, 430, "OVMSPT", "DANG", "b>v (?<=V)s(?=V)>h"),
    Language("qod", _ARMENIAN, 300, "SVMOPT", "DGAN", "S>s k$>h d(?=[ei])>Z"),
)

_Forms = list[tuple[str, ...]]  # The markers of each form of a word.


def _forms(kind: str) -> _Forms:
    if kind.startswith("verb"):
        return [n + tense for n in ((), ("not",)) for tense in ((), ("past",), ("future",))]
    if kind in (*_NOUN_KINDS, "pronoun", "name"):
        return [n + case for n in ((), ("plural",)) for case in ((), ("object",), ("owner",))]
    return [()]


class Speaker:
    """Expresses meanings in one language. Every word that it writes has one meaning."""

    def __init__(self, language: Language) -> None:
        self.language, self._family = language, language.family
        changes = language.changes.replace("V", f"[{_VOWELS}]").split()
        self._changes = [change.split(">") for change in changes]
        self._letters = str.maketrans(_SOUNDS, self._family.letters)
        self._affixes = dict(zip(_MARKERS, self._family.affixes.split(), strict=True))
        self._words: dict[tuple[str, ...], str] = {}

    def can_learn(self, root: str, forms: _Forms) -> bool:
        """Returns whether a root's forms differ from each other and from all known words."""
        written = {self._inflect(root, markers) for markers in forms}
        return len(written) == len(forms) and written.isdisjoint(self._words.values())

    def learn(self, word: str, root: str, forms: _Forms) -> None:
        """Adds the forms of a word, given in English."""
        self._words |= {(word, *markers): self._inflect(root, markers) for markers in forms}

    def sentence(self, sentence: Sentence) -> str:
        """Returns the written sentence."""
        words = self._clause(sentence.first)
        if sentence.is_question:
            words = self._join(words, self._word("question"))
        if sentence.second:
            words += [*self._word(sentence.link), *self._clause(sentence.second)]
        return _finish(words, sentence.is_question)

    def _clause(self, clause: Clause) -> list[str]:
        negation = ["not"] if clause.is_negated else []
        tense = [] if clause.tense == "present" else [clause.tense]
        parts = {
            "S": self._noun(clause.subject),
            "V": self._word(clause.verb, *negation, *tense),
            "O": self._noun(clause.object, "object"),
            "M": self._word(clause.manner),
            "P": self._join(self._noun(clause.place), self._word(clause.preposition)),
            "T": self._word(clause.time),
        }
        return [word for part in self.language.order for word in parts[part]]

    def _noun(self, noun: Noun | None, *case: str) -> list[str]:
        if noun is None:
            return []
        number = ["plural"] if noun.is_plural else []
        parts = {
            "D": [] if noun.determiner == "a" else self._word(noun.determiner),
            "A": [word for adjective in noun.adjectives for word in self._word(adjective)],
            "N": self._word(noun.head, *number, *case),
            "G": self._noun(noun.owner, "owner"),
        }
        return [word for part in self.language.noun_order for word in parts[part]]

    def _word(self, word: str, *markers: str) -> list[str]:
        return [self._words[word, *markers]] if word else []

    def _join(self, words: list[str], added: list[str]) -> list[str]:
        return added + words if self._family.has_prefixes else words + added

    def _inflect(self, root: str, markers: tuple[str, ...]) -> str:
        affixes = "".join(self._affixes[marker] for marker in markers)
        sounds = affixes + root if self._family.has_prefixes else root + affixes
        for pattern, replacement in self._changes:
            sounds = re.sub(pattern, replacement, sounds)
        return sounds.translate(self._letters)


def speakers(seed: int) -> list[Speaker]:
    """Returns the speakers of all languages, from the largest language to the smallest."""
    made = [Speaker(language) for language in LANGUAGES]
    for family in FAMILIES:
        rng = random.Random(f"{seed} {family.letters}")
        relatives = [speaker for speaker in made if speaker.language.family == family]
        for kind, words in _WORDS.items():
            forms = _forms(kind)
            for word in words:
                root = family.root(rng, is_short=len(forms) == 1)
                while not all(speaker.can_learn(root, forms) for speaker in relatives):
                    root = family.root(rng, is_short=len(forms) == 1)
                for speaker in relatives:
                    speaker.learn(word, root, forms)
    return made


def meanings(seed: int, count: int) -> list[Sentence]:
    """Draws `count` meanings; the English of no two differs only in case or punctuation."""
    rng = random.Random(f"{seed} meanings")
    drawn: dict[str, Sentence] = {}
    while len(drawn) < count:
        sentence = _sentence(rng)
        text = english(sentence)
        if _MIN_WORDS <= len(text.split()) <= _MAX_WORDS:
            drawn.setdefault(cleaning.english_key(text), sentence)
    return list(drawn.values())


def write_corpus(out_dir: pathlib.Path, seed: int) -> None:
    """Writes `<split>/<language>-en.tsv.gz` for every split and language."""
    drawn = meanings(seed, _NUM_MEANINGS)
    dev, test = drawn[:_NUM_HELD_OUT], drawn[_NUM_HELD_OUT : 2 * _NUM_HELD_OUT]
    for speaker in speakers(seed):
        code, num_pairs = speaker.language.code, speaker.language.num_pairs
        rng = random.Random(f"{seed} train {code}")
        train = rng.sample(drawn[2 * _NUM_HELD_OUT :], num_pairs)
        for split, sentences in {"dev": dev, "test": test, "train": train}.items():
            pairs = (tsv.Pair(speaker.sentence(one), english(one)) for one in sentences)
            tsv.write(out_dir / split / f"{code}-en.tsv.gz", pairs)
        logging.info("%s: %d training pairs", code, num_pairs)


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.INFO)
    write_corpus(pathlib.Path(flags.FLAGS.out), flags.FLAGS.seed)


if __name__ == "__main__":
    # Defined here because tests import this module beside others that have a flag --out.
    flags.DEFINE_string("out", None, "The folder to write.", required=True)
    flags.DEFINE_integer("seed", 1, "Decides the words and the sentences.")
    cli.run("data_prep.constructed", main)
