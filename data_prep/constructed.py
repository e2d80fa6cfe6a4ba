"""Writes a many-to-English corpus of constructed languages.

    python -m data_prep.constructed --out=TEXT_DIR --seed=1
    gshard prepare --input=TEXT_DIR --out=DATA_DIR

Each sentence is drawn as a meaning and then expressed in English and in fourteen languages of four
families. The languages of a family share a script, roots and grammatical markers; each has its own
sound changes and word order. Every source sentence has exactly one English translation, so a model
can reach 100 BLEU. All languages share their dev and test sentences, which don't occur in training.
The files depend only on the seed.
"""

import dataclasses
import pathlib
import random
import re

from absl import flags, logging

from data_prep import meanings, tsv
from data_prep.meanings import Clause, Noun, Sentence
from lingvo_gshard import cli
from xla_spmd.files import lock

_NUM_MEANINGS = 40_000
_NUM_HELD_OUT = 100

_VOWELS = "aeiou"
_SOUNDS = _VOWELS + "pbtdkgmnszSZCNxlrhwyfv"  # S sh, Z zh, C ch, N ng.
_MARKERS = ("plural", "object", "owner", "past", "future", "not")


@dataclasses.dataclass(frozen=True)
class Family:
    """The common features of related languages."""

    letters: str  # The script, in the order of the sounds.
    onsets: str  # The consonants at the beginning of a syllable.
    codas: str  # The consonants at its end; many syllables end in a vowel.
    affixes: str  # In the order of _MARKERS.
    # Whether affixes, prepositions and the question word come first; otherwise they come last.
    has_prefixes: bool = False

    def root(self, rng: random.Random, is_short: bool) -> str:
        """Draws the root of a word."""
        num_syllables = rng.choice((1, 2)) if is_short else rng.choice((2, 2, 3))
        root = ""
        for _ in range(num_syllables):
            root += rng.choice(self.onsets)
            root += rng.choice(_VOWELS)
            root += rng.choice(["", "", *self.codas])
        return root


@dataclasses.dataclass(frozen=True)
class Language:
    """The features that distinguish a language from its relatives."""

    code: str  # One of the codes that ISO 639-3 reserves for private use.
    family: Family
    num_pairs: int  # The number of training pairs.
    order: str  # The order in a clause: Subject, Object, Verb, Manner, Place and Time.
    noun_order: str  # In a noun phrase: Determiner, Adjectives, Noun and owner (Genitive).
    # The sound changes applied to every word, in order: "pattern>replacement". V is any vowel.
    changes: str


FAMILIES = {name: Family(**fields) for name, fields in meanings.DATA["families"].items()}
# From the largest language to the smallest.
LANGUAGES = tuple(
    Language(**fields | {"family": FAMILIES[fields["family"]]})
    for fields in meanings.DATA["languages"]
)

_Forms = list[tuple[str, ...]]  # The markers of each form of a word, in the order of its affixes.
# A verb is negated or not, in the present (without a marker), past or future.
_VERB_FORMS: _Forms = [
    (),
    ("past",),
    ("future",),
    ("not",),
    ("not", "past"),
    ("not", "future"),
]
# A noun is singular or plural, as a subject (without a marker), object or owner.
_NOUN_FORMS: _Forms = [
    (),
    ("object",),
    ("owner",),
    ("plural",),
    ("plural", "object"),
    ("plural", "owner"),
]
_INVARIABLE: _Forms = [()]


def _forms(word_class: str) -> _Forms:
    """Returns the forms of the words of a class in constructed.toml."""
    if word_class.startswith("verb"):
        return _VERB_FORMS
    if word_class in (*meanings.NOUN_KINDS, "pronoun", "name"):
        return _NOUN_FORMS
    return _INVARIABLE


class Speaker:
    """Expresses meanings in one language, in which every word has just one meaning."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self._family = language.family

        # The sound changes are regular expressions.
        changes = language.changes.replace("V", f"[{_VOWELS}]").split()
        self._changes = [change.split(">") for change in changes]
        self._letters = str.maketrans(_SOUNDS, self._family.letters)
        self._affixes = dict(zip(_MARKERS, self._family.affixes.split(), strict=True))
        # The written word for each English word with the markers of a form. A missing constituent,
        # and "a", are not written.
        self._words: dict[tuple[str, ...], str] = {("",): "", ("a",): ""}

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
            words = self._join(words, self._words["question",])
        if sentence.second:
            words += [self._words[sentence.link,], *self._clause(sentence.second)]
        return meanings.finish(words, sentence.is_question)

    def _clause(self, clause: Clause) -> list[str]:
        negation = ["not"] if clause.is_negated else []
        tense = [] if clause.tense == "present" else [clause.tense]
        # A missing constituent is an empty list, or an empty word.
        constituents = {
            "S": self._noun(clause.subject),
            "V": [self._words[clause.verb, *negation, *tense]],
            "O": self._noun(clause.object, "object"),
            "M": [self._words[clause.manner,]],
            "P": self._join(self._noun(clause.place), self._words[clause.preposition,]),
            "T": [self._words[clause.time,]],
        }

        words: list[str] = []
        for letter in self.language.order:
            words += constituents[letter]
        return words

    def _noun(self, noun: Noun | None, *case: str) -> list[str]:
        if noun is None:
            return []
        # Only the noun is inflected, not its dependents; an owner has its own case.
        number = ["plural"] if noun.is_plural else []
        constituents = {
            "D": [self._words[noun.determiner,]],
            "A": [self._words[adjective,] for adjective in noun.adjectives],
            "N": [self._words[noun.head, *number, *case]],
            "G": self._noun(noun.owner, "owner"),
        }

        words: list[str] = []
        for letter in self.language.noun_order:
            words += constituents[letter]
        return words

    def _join(self, words: list[str], particle: str) -> list[str]:
        """Returns words with a particle on the family's side: a preposition or a postposition."""
        if self._family.has_prefixes:
            return [particle, *words]
        return [*words, particle]

    def _inflect(self, root: str, markers: tuple[str, ...]) -> str:
        """Returns a form of a word in writing, after the language's sound changes."""
        affixes = "".join(self._affixes[marker] for marker in markers)
        sounds = affixes + root if self._family.has_prefixes else root + affixes
        for pattern, replacement in self._changes:
            sounds = re.sub(pattern, replacement, sounds)
        return sounds.translate(self._letters)


def speakers(seed: int) -> list[Speaker]:
    """Returns the speakers of all languages, from the largest language to the smallest."""
    all_speakers = [Speaker(language) for language in LANGUAGES]
    for family in FAMILIES.values():
        rng = random.Random(f"{seed} {family.letters}")
        relatives = [speaker for speaker in all_speakers if speaker.language.family == family]
        for word_class, words in meanings.WORDS.items():
            for word in words:
                _teach(word, _forms(word_class), family, relatives, rng)
    return all_speakers


def _teach(
    word: str, forms: _Forms, family: Family, relatives: list[Speaker], rng: random.Random
) -> None:
    """Gives the languages of a family the same root for a word."""
    while True:
        root = family.root(rng, is_short=forms == _INVARIABLE)
        # Because of sound changes, words that differ in one language may be alike in another.
        if all(speaker.can_learn(root, forms) for speaker in relatives):
            break
    for speaker in relatives:
        speaker.learn(word, root, forms)


def write_corpus(out_dir: pathlib.Path, seed: int) -> None:
    """Writes `<split>/<language>-en.tsv.gz` for every split and language."""
    # The languages share dev and test, and each draws its training sentences from the rest.
    sentences = meanings.draw(seed, _NUM_MEANINGS)
    dev = sentences[:_NUM_HELD_OUT]
    test = sentences[_NUM_HELD_OUT : 2 * _NUM_HELD_OUT]
    for_training = sentences[2 * _NUM_HELD_OUT :]

    for speaker in speakers(seed):
        code = speaker.language.code
        rng = random.Random(f"{seed} train {code}")
        train = rng.sample(for_training, speaker.language.num_pairs)
        for split, of_split in {"dev": dev, "test": test, "train": train}.items():
            pairs = (_pair(sentence, speaker) for sentence in of_split)
            tsv.write(out_dir / split / f"{code}-en.tsv.gz", pairs)
        logging.info("%s: %d training pairs", code, len(train))


def _pair(sentence: Sentence, speaker: Speaker) -> tsv.Pair:
    return tsv.Pair(speaker.sentence(sentence), meanings.english(sentence))


def main() -> None:
    """Writes the corpus of --seed to --out."""
    logging.set_verbosity(logging.INFO)
    out_dir = pathlib.Path(flags.FLAGS.out)
    with lock.held(out_dir, "writes this folder"):
        write_corpus(out_dir, flags.FLAGS.seed)


if __name__ == "__main__":
    # Defined here because tests import this module together with others that have a flag --out.
    flags.DEFINE_string("out", None, "The folder to write.", required=True)
    flags.DEFINE_integer("seed", 1, "Decides the words and the sentences.")
    cli.run("data_prep.constructed", main)
