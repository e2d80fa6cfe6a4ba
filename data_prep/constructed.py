"""Writes a many-to-English corpus of constructed languages.

    python -m data_prep.constructed --out=TEXT_DIR --seed=1
    python -m data_prep.build --input=TEXT_DIR --out=DATA_DIR

Each sentence is drawn as a meaning and then expressed in English and in fourteen languages of four
families. The languages of a family share a script, roots and grammatical markers; each has its own
sound changes and word order. Every source sentence has exactly one English translation, so a model
can reach 100 BLEU. Training sizes fall geometrically from 32,000 pairs to 300. All languages share
their dev and test sentences, and no English sentence occurs in two splits. The files depend on
nothing but the seed.
"""

import dataclasses
import itertools
import pathlib
import random
import re
from collections.abc import Iterable

from absl import flags, logging

from data_prep import cleaning, tsv
from lingvo_gshard import cli

_OUT = flags.DEFINE_string("out", None, "The folder to write.", required=True)
_SEED = flags.DEFINE_integer("seed", 1, "Decides the words and the sentences.")

_MAX_PAIRS, _MIN_PAIRS = 32_000, 300
_NUM_MEANINGS = 40_000
_NUM_HELD_OUT = 100
_MIN_WORDS, _MAX_WORDS = 4, 16

# English words by class. An irregular form follows its word after a colon.
_LEXICON = {
    "person": """actor artist aunt baker boy captain carpenter clerk cousin dentist driver engineer
        farmer gardener girl guide hero:heroes inventor mayor nurse officer pilot plumber porter
        prince princess sailor scientist singer spy teacher tourist waiter witch woman:women
        man:men child:children wife:wives thief:thieves""",
    "animal": """ant beaver bear cat chicken crocodile dog dolphin eagle elephant falcon frog horse
        kitten lion lizard lobster monkey owl parrot penguin pigeon rabbit seal shark snail squirrel
        tiger turtle whale wolf:wolves mouse:mice goose:geese""",
    "food": """apple banana biscuit carrot cherry coconut cookie cucumber egg lemon mushroom pancake
        peach pear pumpkin sandwich sausage walnut potato:potatoes loaf:loaves""",
    "thing": """anchor ball barrel bell bottle bucket button camera candle carpet chair coin compass
        curtain drum feather flute guitar hat helmet jacket ladder lantern letter magazine map
        mirror necklace needle novel pencil piano pillow pipe ring rope shirt shovel statue table
        telescope towel trumpet umbrella violin wagon knife:knives scarf:scarves""",
    "place": """bakery bay bridge canal castle cave cellar cottage desert factory forest garden
        harbor hospital hotel house island lake library market meadow mountain museum orchard palace
        park prison river school stadium station temple theater tower tunnel village""",
    "name": "Elena Greta Nils Omar Pedro Ravi Sofia Yuri",
    "adjective": """ancient angry big blue brave bright brown calm clever cold dark dirty famous
        gentle green happy heavy huge hungry kind large lazy lonely lucky modern narrow nervous
        noisy old patient pink polite poor proud purple rare red rich rough sad shy silent small
        soft strange strong tall thin tiny tired ugly white wild wise yellow young""",
    "manner": "slowly quickly quietly badly happily secretly alone together politely suddenly",
    "present": "now today always often",
    "past": "yesterday once today recently",
    "future": "tomorrow soon today later",
    "preposition of place": "in near behind from to through",
    "preposition of thing": "with under on without",
    "possessive": "my your his her our their",
    "numeral": "two three four five six seven eight nine ten",
    "link": "and but or because",
}
_NOUN_CLASSES = ("person", "animal", "food", "thing", "place")
_PRONOUNS = {"I": "me", "you": "you", "he": "him", "she": "her", "we": "us", "they": "them"}
_PLURAL_PRONOUNS = ("we", "they")
# The classes of a verb's subjects and objects ("that" stands for a clause), and its verbs.
_VERBS = {
    "person animal > ": "run:ran jump wait fall:fell swim:swam rest hide:hid sleep:slept wander",
    "person > ": "laugh whistle travel work argue smile kneel:knelt pray complain sing:sang",
    "person animal > person animal food thing place": """see:saw find:found watch touch like fear
        leave:left approach notice avoid""",
    "person animal > person animal": "chase hear:heard bite:bit meet:met kick follow",
    "person animal > food": "eat:ate smell taste steal:stole swallow",
    "person > person animal": "call catch:caught feed:fed thank visit teach:taught rescue",
    "person > food thing": """buy:bought sell:sold carry bring:brought lose:lost want count
        throw:threw send:sent""",
    "person > thing": "break:broke repair clean push lift polish make:made copy",
    "person > place": "enter cross paint describe explore build:built",
    "person > food": "cook peel boil slice fry",
    "person > that": "say:said think:thought know:knew believe hope dream forget:forgot",
}
_BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}


def _add_s(word: str) -> str:
    word = re.sub("(?<![aeiou])y$", "ie", word)
    return word + ("es" if word.endswith(("s", "sh", "ch", "x", "z")) else "s")


def _add_ed(word: str) -> str:
    return re.sub("(?<![aeiou])y$", "i", word).removesuffix("e") + "ed"


def _entries(words: str) -> list[tuple[str, str]]:
    """Splits `words` into each word and its irregular form, which is empty if it has none."""
    return [(word, form) for word, _, form in (entry.partition(":") for entry in words.split())]


_WORDS = {kind: [word for word, _ in _entries(words)] for kind, words in _LEXICON.items()}
_PLURALS = {n: form or _add_s(n) for kind in _NOUN_CLASSES for n, form in _entries(_LEXICON[kind])}
_PASTS = {v: form or _add_ed(v) for words in _VERBS.values() for v, form in _entries(words)}


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
    """A subject and what is said of it; with the verb "be", that is a quality."""

    subject: Noun
    verb: str
    tense: str
    is_negated: bool = False
    object: Noun | None = None
    quality: str = ""
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


class _Sampler:
    """Draws meanings in which verbs have subjects and objects that suit them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._verbs: dict[str, list[tuple[str, str, str]]] = {}
        for classes, words in _VERBS.items():
            subjects, objects = classes.split(" > ")
            kind = objects if objects in ("", "that") else "transitive"
            entries = [(verb, subjects, objects) for verb, _ in _entries(words)]
            self._verbs.setdefault(kind, []).extend(entries)

    def sentence(self) -> Sentence:
        """Draws a sentence."""
        kind = self._rng.random()
        if kind < 0.72:
            return Sentence(self._clause(), is_question=kind < 0.12)
        if kind < 0.84:
            verb, subjects, _ = self._rng.choice(self._verbs["that"])
            report = Clause(self._noun(subjects), verb, self._tense(), self._chance(0.15))
            return Sentence(report, "that", self._clause(is_short=True))
        clauses = (self._clause(is_short=True) for _ in range(2))
        return Sentence(next(clauses), self._rng.choice(_WORDS["link"]), next(clauses))

    def _clause(self, is_short: bool = False) -> Clause:
        tense, depth = self._tense(), 0 if is_short else 1
        time = self._rng.choice(_WORDS[tense]) if self._chance(0.2) else ""
        if self._chance(0.15):
            subject = self._noun(" ".join(_NOUN_CLASSES), depth)
            quality = self._rng.choice(_WORDS["adjective"])
            return Clause(subject, "be", tense, self._chance(0.2), quality=quality, time=time)
        kind = "transitive" if self._chance(0.65) else ""
        verb, subjects, objects = self._rng.choice(self._verbs[kind])
        has_place = self._chance(0.15 if is_short else 0.4)
        ground = self._rng.choice(("place", "place", "thing"))
        return Clause(
            subject=self._noun(subjects, depth),
            verb=verb,
            tense=tense,
            is_negated=self._chance(0.15),
            object=self._noun(objects, depth) if objects else None,
            manner=self._rng.choice(_WORDS["manner"]) if self._chance(0.2) else "",
            preposition=self._rng.choice(_WORDS[f"preposition of {ground}"]) if has_place else "",
            place=self._noun(ground) if has_place else None,
            time=time,
        )

    def _noun(self, kinds: str, depth: int = 0) -> Noun:
        """Draws a noun of one of `kinds`; with a depth of 1 it may have an owner."""
        kind = self._rng.choice(kinds.split())
        if "person" in kinds and self._chance(0.15):
            pronoun = self._rng.choice(list(_PRONOUNS))
            return Noun(pronoun, is_plural=pronoun in _PLURAL_PRONOUNS)
        if kind == "person" and self._chance(0.1):
            return Noun(self._rng.choice(_WORDS["name"]))
        head, is_plural = self._rng.choice(_WORDS[kind]), self._chance(0.3)
        count = self._rng.choices((0, 1, 2), (0.55, 0.37, 0.08))[0]
        adjectives = tuple(self._rng.sample(_WORDS["adjective"], count))
        if depth and self._chance(0.2):
            name = Noun(self._rng.choice(_WORDS["name"]))
            owner = name if self._chance(0.25) else self._noun("animal person")
            if owner.head not in _PRONOUNS:
                return Noun(head, "", is_plural, adjectives, owner)
        return Noun(head, self._determiner(is_plural), is_plural, adjectives)

    def _determiner(self, is_plural: bool) -> str:
        counted = ["many", *_WORDS["numeral"]] if is_plural else ["every"]
        choices = (["the"], ["a"], ["this"], _WORDS["possessive"], counted)
        return self._rng.choice(self._rng.choices(choices, (50, 22, 10, 10, 8))[0])

    def _tense(self) -> str:
        return self._rng.choice(("present", "past", "past", "future"))

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability


def english(sentence: Sentence) -> str:
    """Returns the English sentence."""
    words = _english_clause(sentence.first, sentence.is_question)
    if sentence.second is not None:
        words += [sentence.link, *_english_clause(sentence.second)]
    return _finish(words, sentence.is_question)


def _finish(words: Iterable[str], is_question: bool) -> str:
    text = " ".join(words)
    return text[0].upper() + text[1:] + ("?" if is_question else ".")


def _english_clause(clause: Clause, is_question: bool = False) -> list[str]:
    finite, *others = _english_verb(clause, is_question)
    subject = _english_noun(clause.subject)
    words = [finite, *subject, *others] if is_question else [*subject, finite, *others]
    if clause.object:
        words += _english_noun(clause.object, is_object=True)
    words += [word for word in (clause.quality, clause.manner) if word]
    if clause.place:
        words += [clause.preposition, *_english_noun(clause.place)]
    return [*words, clause.time] if clause.time else words


def _english_verb(clause: Clause, is_question: bool) -> list[str]:
    """Returns the finite verb or auxiliary, then "not", then the rest."""
    person = 0 if clause.subject.head == "I" else 1
    if clause.subject.is_plural or clause.subject.head == "you":
        person = 2
    negation = ["not"] if clause.is_negated else []
    if clause.tense == "future":
        return ["will", *negation, clause.verb]
    if clause.verb == "be":
        return [_BE[clause.tense][person], *negation]
    if negation or is_question:
        auxiliary = "did" if clause.tense == "past" else "does" if person == 1 else "do"
        return [auxiliary, *negation, clause.verb]
    if clause.tense == "past":
        return [_PASTS[clause.verb]]
    return [_add_s(clause.verb) if person == 1 else clause.verb]


def _english_noun(noun: Noun, is_object: bool = False) -> list[str]:
    if noun.head in _PRONOUNS:
        return [_PRONOUNS[noun.head] if is_object else noun.head]
    words = [*noun.adjectives, _PLURALS[noun.head] if noun.is_plural else noun.head]
    if noun.owner:
        *others, last = _english_noun(noun.owner)
        ending = "'" if noun.owner.is_plural and last.endswith("s") else "'s"
        return [*others, last + ending, *words]
    determiner = noun.determiner
    if determiner == "a":
        determiner = "" if noun.is_plural else "an" if words[0][0] in "aeiou" else "a"
    elif determiner == "this" and noun.is_plural:
        determiner = "these"
    return [determiner, *words] if determiner else words


_SOUNDS = "aeioupbtdkgmnszSZCNxlrhwyfv"  # S sh, Z zh, C ch, N ng.


@dataclasses.dataclass(frozen=True)
class Language:
    """What sets a language apart from its relatives.

    Attributes:
        code: one of those that ISO 639-3 reserves for private use.
        order: the order of Subject, Object (or quality), Verb, Manner, Place and Time.
        noun_order: the order of Determiner, Adjectives, Noun and owner (Genitive).
        changes: the sound changes that every word went through, in order: "pattern>replacement".
    """

    code: str
    order: str
    noun_order: str
    changes: str


@dataclasses.dataclass(frozen=True)
class Family:
    """What related languages share.

    Attributes:
        letters: the script, in the order of the sounds.
        onsets, vowels, codas: the sounds of a proto-syllable; half of them or more have no coda.
        markers: the proto-forms of plural, object, owner, past, future and not, in this order: each
            a suffix "-x", a prefix "x-" or a word "x".
        unmarked: the article that is not expressed.
        languages: its members.
        is_head_final: adpositions, markers that are words, and the question word come last.
        agrees: adjectives and verbs take the plural marker, too.
    """

    letters: str
    onsets: str
    vowels: str
    codas: str
    markers: str
    unmarked: str
    languages: tuple[Language, ...]
    is_head_final: bool = False
    agrees: bool = False

    def proto_word(self, rng: random.Random, num_syllables: int) -> str:
        """Draws a word of the proto-language."""
        return "".join(
            rng.choice(self.onsets) + rng.choice(self.vowels) + rng.choice(["", "", *self.codas])
            for _ in range(num_syllables)
        )


_VOWEL_BEFORE, _VOWEL_AFTER = "(?<=[aeiou])", "(?=[aeiou])"
# "A" follows the vowel before it: e after e and i, a after the others.
_HARMONY = 3 * "(?<=[ei][^aeiouA])A|(?<=[ei][^aeiouA]{2})A>e " + "A>a "
FAMILIES = (
    Family(
        letters="aeioupbtdkgmnszšžčñxlrhwyfv",
        onsets="ptkbdgmnslrv",
        vowels="aeiou",
        codas="nrls",
        markers="-kes -mu -nis -da vor nen",
        unmarked="a",
        agrees=True,
        languages=(
            Language("qta", "SVMOPT", "DANG", "k(?=[ei])>C s(?=i)>S"),
            Language("qtb", "SVMOPT", "DNAG", f"p{_VOWEL_AFTER}>f t{_VOWEL_AFTER}>d o>u"),
            Language("qtc", "TSOMVP", "DANG", f"{_VOWEL_BEFORE}k{_VOWEL_AFTER}>g e(?=[nr])>ya"),
            Language("qtd", "OVMSPT", "DANG", f"b>v {_VOWEL_BEFORE}s{_VOWEL_AFTER}>h"),
        ),
    ),
    Family(
        letters="աեիոըպբտդկգմնսզշժչղխլրհւյֆվ",
        onsets="kgtdbmnsyrlCS",
        vowels="aeiou",
        codas="knrz",
        markers="-lAr -mun -nAx -dug -CAk -mAs",
        unmarked="the",
        agrees=True,
        is_head_final=True,
        languages=(
            Language("qoa", "TSPOMV", "DGAN", _HARMONY),
            Language("qob", "TSPOMV", "DAGN", f"{_HARMONY} ^k>x g>w z{_VOWEL_AFTER}>s"),
            Language("qoc", "SPOMVT", "DGAN", f"{_HARMONY} C>Z u>o {_VOWEL_BEFORE}b>v"),
            Language("qod", "SVMOPT", "DGAN", f"{_HARMONY} S>s k$>h d(?=[ei])>Z"),
        ),
    ),
    Family(
        letters="ⴰⴻⵉⵄⵓⵒⴱⵜⴷⴽⴳⵎⵏⵙⵣⵛⵊⵞⵖⵅⵍⵔⵀⵡⵢⴼⵠ",
        onsets="ShnmrltdkbfxwC",
        vowels="aiueo",
        codas="mlSt",
        markers="wi- te- Sel kan- sof- lof",
        unmarked="a",
        agrees=True,
        languages=(
            Language("qsa", "VMSOPT", "DNAG", f"{_VOWEL_BEFORE}h>x t(?=m)>n"),
            Language("qsb", "TVMSOP", "NADG", "x>k f>p a(?=[mn])>o"),
            Language("qsc", "SVMOPT", "DNAG", f"S>s t(?=[iu])>C {_VOWEL_BEFORE}d>z"),
        ),
    ),
    Family(
        letters="аеиоупбтдкгмнсзшжчңхлрһўйфв",
        onsets="ptkmnlhwysCN",
        vowels="aeiou",
        codas="nN",
        markers="mena koi noN tele kamai pohu",
        unmarked="a",
        languages=(
            Language("qla", "TSVMOP", "GNAD", "t(?=i)>C"),
            Language("qlb", "TSVMOP", "DGAN", "p>b k(?=[ou])>g w>v"),
            Language("qlc", "TSPOMV", "GNAD", f"{_VOWEL_BEFORE}t>d s>S e(?=N)>i"),
        ),
    ),
)
# From the largest to the smallest, so that every family has large and small languages.
_BY_SIZE = "qta qoa qsa qla qtb qob qlb qsb qtc qoc qlc qsc qtd qod"
LANGUAGES_BY_SIZE = tuple(_BY_SIZE.split())


def _chains(*choices: str) -> tuple[tuple[str, ...], ...]:
    """Every chain of markers with one, or none, of each of `choices`."""
    options = [((), *((marker,) for marker in choice.split())) for choice in choices]
    return tuple(tuple(itertools.chain(*chain)) for chain in itertools.product(*options))


_FUNCTION_WORDS = ["the", "a", "this", "every", "many", "that", "question"]
for _kind in ("possessive", "numeral", "preposition of place", "preposition of thing", "link"):
    _FUNCTION_WORDS += _WORDS[_kind]
_ADVERBS = [word for kind in ("manner", "present", "past", "future") for word in _WORDS[kind]]
# The chains of markers that each word may take.
_FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys([*_FUNCTION_WORDS, *_ADVERBS], _chains()),
    **dict.fromkeys([*_PRONOUNS, *_WORDS["name"], *_PLURALS], _chains("plural", "object owner")),
    **dict.fromkeys(["be", *_PASTS], _chains("not", "past future", "plural")),
    **dict.fromkeys(_WORDS["adjective"], _chains("plural")),
}


class Speaker:
    """Expresses meanings in one language. Every word that it writes has one meaning."""

    def __init__(self, language: Language, family: Family) -> None:
        self._language, self._family = language, family
        self._changes = [change.split(">") for change in language.changes.split()]
        self._letters = str.maketrans(_SOUNDS, family.letters)
        names = ("plural", "object", "owner", "past", "future", "not")
        self._markers = dict(zip(names, family.markers.split(), strict=True))
        self._known = {self._write(form) for form in self._markers.values() if "-" not in form}
        self._forms: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def forms(self, concept: str, root: str) -> dict[tuple[str, tuple[str, ...]], list[str]]:
        """Returns the words of each form of a concept, by the concept and its markers."""
        return {(concept, names): self._inflect(root, names) for names in _FORMS[concept]}

    def can_learn(self, concept: str, root: str) -> bool:
        """Returns whether a new word's forms differ from each other and from all known words."""
        forms = list(map(tuple, self.forms(concept, root).values()))
        heads = {form[self._head_index] for form in forms}
        return len(set(forms)) == len(forms) and heads.isdisjoint(self._known)

    def learn(self, concept: str, root: str) -> None:
        """Adds a word."""
        forms = self.forms(concept, root)
        self._forms |= forms
        self._known.update(form[self._head_index] for form in forms.values())

    def sentence(self, sentence: Sentence) -> str:
        """Returns the written sentence."""
        words = self._clause(sentence.first)
        if sentence.is_question:
            words = self._join(words, self._word("question"))
        if sentence.second is not None:
            words += [*self._word(sentence.link), *self._clause(sentence.second)]
        return _finish(words, sentence.is_question)

    @property
    def _head_index(self) -> int:
        return 0 if self._family.is_head_final else -1

    def _clause(self, clause: Clause) -> list[str]:
        number = ("plural",) if self._family.agrees and clause.subject.is_plural else ()
        negation = ("not",) if clause.is_negated else ()
        tense = () if clause.tense == "present" else (clause.tense,)
        parts = {
            "S": self._noun(clause.subject),
            "V": self._word(clause.verb, *negation, *tense, *number),
            "O": self._noun(clause.object, "object"),
            "M": self._word(clause.manner),
            "P": self._join(self._noun(clause.place), self._word(clause.preposition)),
            "T": self._word(clause.time),
        }
        if clause.quality:
            parts["O"] = self._word(clause.quality, *number)
        return [word for part in self._language.order for word in parts[part]]

    def _noun(self, noun: Noun | None, *case: str) -> list[str]:
        if noun is None:
            return []
        number = ("plural",) if noun.is_plural else ()
        agreement = number if self._family.agrees else ()
        is_silent = noun.determiner == self._family.unmarked
        parts = {
            "D": [] if is_silent else self._word(noun.determiner),
            "A": [word for name in noun.adjectives for word in self._word(name, *agreement)],
            "N": self._word(noun.head, *number, *case),
            "G": self._noun(noun.owner, "owner"),
        }
        return [word for part in self._language.noun_order for word in parts[part]]

    def _word(self, concept: str, *markers: str) -> list[str]:
        return self._forms[concept, markers] if concept else []

    def _join(self, head: list[str], added: list[str]) -> list[str]:
        return head + added if self._family.is_head_final else added + head

    def _inflect(self, root: str, markers: tuple[str, ...]) -> list[str]:
        """Returns the written word with its affixes and, beside it, markers that are words."""
        particles = []
        for marker in (self._markers[name] for name in markers):
            if marker.startswith("-"):
                root += marker[1:]
            elif marker.endswith("-"):
                root = marker[:-1] + root
            else:
                particles.append(self._write(marker))
        return self._join([self._write(root)], particles)

    def _write(self, sounds: str) -> str:
        for pattern, replacement in self._changes:
            sounds = re.sub(pattern, replacement, sounds)
        return sounds.translate(self._letters)


def speakers(seed: int) -> dict[str, Speaker]:
    """Returns the speakers of all languages by code, from the largest language to the smallest."""
    made: dict[str, Speaker] = {}
    for family in FAMILIES:
        rng = random.Random(f"{seed} {family.letters}")
        relatives = [Speaker(language, family) for language in family.languages]
        for concept in _FORMS:
            num_syllables = (1, 2) if concept in _FUNCTION_WORDS else (2, 2, 3)
            roots = (family.proto_word(rng, rng.choice(num_syllables)) for _ in itertools.count())
            root = next(
                root for root in roots if all(s.can_learn(concept, root) for s in relatives)
            )
            for speaker in relatives:
                speaker.learn(concept, root)
        codes = (language.code for language in family.languages)
        made |= dict(zip(codes, relatives, strict=True))
    return {code: made[code] for code in LANGUAGES_BY_SIZE}


def num_pairs() -> dict[str, int]:
    """Returns the number of training pairs of each language."""
    steps = len(LANGUAGES_BY_SIZE) - 1
    return {
        code: round(_MAX_PAIRS * (_MIN_PAIRS / _MAX_PAIRS) ** (rank / steps))
        for rank, code in enumerate(LANGUAGES_BY_SIZE)
    }


def meanings(seed: int, count: int) -> dict[str, Sentence]:
    """Draws `count` meanings, keyed by their English; no two differ only in case or punctuation."""
    sampler = _Sampler(random.Random(f"{seed} meanings"))
    drawn: dict[str, Sentence] = {}
    keys: set[str] = set()
    while len(drawn) < count:
        sentence = sampler.sentence()
        text = english(sentence)
        key = cleaning.english_key(text)
        if key not in keys and _MIN_WORDS <= len(text.split()) <= _MAX_WORDS:
            keys.add(key)
            drawn[text] = sentence
    return drawn


def write_corpus(out_dir: pathlib.Path, seed: int) -> None:
    """Writes `<split>/<language>-en.tsv.gz` for every split and language."""
    drawn = meanings(seed, _NUM_MEANINGS)
    texts = list(drawn)
    held_out = {"dev": texts[:_NUM_HELD_OUT], "test": texts[_NUM_HELD_OUT : 2 * _NUM_HELD_OUT]}
    sizes = num_pairs()
    for code, speaker in speakers(seed).items():
        rng = random.Random(f"{seed} train {code}")
        chosen = rng.sample(texts[2 * _NUM_HELD_OUT :], sizes[code])
        for split, members in {**held_out, "train": chosen}.items():
            pairs = [tsv.Pair(speaker.sentence(drawn[text]), text) for text in members]
            tsv.write(out_dir / split / f"{code}-en.tsv.gz", pairs)
        logging.info("%s: %d training pairs", code, sizes[code])


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.INFO)
    write_corpus(pathlib.Path(_OUT.value), _SEED.value)


if __name__ == "__main__":
    cli.run("data_prep.constructed", main)
