"""Writes a many-to-English corpus of constructed languages.

    python -m data_prep.constructed --out=TEXT_DIR --seed=1
    python -m data_prep.build --input=TEXT_DIR --out=DATA_DIR

A sentence is drawn as a meaning (conlang/meaning.py) and said in English and in fourteen languages
of four families (conlang/families.py). In each language the source determines the English, so a
model can reach 100 BLEU. Languages have from 32,000 training pairs down to 300, in a geometric
progression; dev and test are the same sentences in all languages, and no English sentence is in two
splits. The files depend on the seed alone, byte for byte.
"""

import pathlib
import random

from absl import app, flags, logging

from data_prep import cleaning, tsv
from data_prep.conlang import english, families, lexicon, meaning, realize, sampling

_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)
_SEED = flags.DEFINE_integer("seed", 1, "Of words, sentences and their distribution.")

# From the largest to the smallest, so that every family has large and small languages.
_LANGUAGES_BY_SIZE = "qta qoa qsa qla qtb qob qlb qsb qtc qoc qlc qsc qtd qod"
LANGUAGES_BY_SIZE = tuple(_LANGUAGES_BY_SIZE.split())
_MAX_PAIRS, _MIN_PAIRS = 32_000, 300
_NUM_MEANINGS = 40_000
_NUM_HELD_OUT = 100
_MIN_WORDS, _MAX_WORDS = 4, 16


def sizes() -> dict[str, int]:
    """Training pairs of each language."""
    steps = len(LANGUAGES_BY_SIZE) - 1
    return {
        code: round(_MAX_PAIRS * (_MIN_PAIRS / _MAX_PAIRS) ** (rank / steps))
        for rank, code in enumerate(LANGUAGES_BY_SIZE)
    }


def meanings(seed: int, count: int) -> dict[str, meaning.Sentence]:
    """Draws `count` meanings, keyed by their English; no two differ in case or marks alone."""
    sampler = sampling.MeaningSampler(random.Random(f"{seed} meanings"))
    drawn: dict[str, meaning.Sentence] = {}
    keys: set[str] = set()
    while len(drawn) < count:
        sentence = sampler.sentence()
        text = english.sentence(sentence)
        key = cleaning.english_key(text)
        if key not in keys and _MIN_WORDS <= len(text.split()) <= _MAX_WORDS:
            keys.add(key)
            drawn[text] = sentence
    return drawn


def realizers(seed: int) -> dict[str, realize.Realizer]:
    """The fourteen languages by code, largest first."""
    made = {
        words.language.code: realize.Realizer(words)
        for family in families.FAMILIES
        for words in lexicon.build(family, seed)
    }
    return {code: made[code] for code in LANGUAGES_BY_SIZE}


def write_corpus(out_dir: pathlib.Path, seed: int) -> dict[str, int]:
    """Writes all files. Returns the training pairs of each language."""
    drawn = meanings(seed, _NUM_MEANINGS)
    texts = list(drawn)
    held_out = {"dev": texts[:_NUM_HELD_OUT], "test": texts[_NUM_HELD_OUT : 2 * _NUM_HELD_OUT]}
    train = texts[2 * _NUM_HELD_OUT :]
    num_pairs = sizes()
    for code, realizer in realizers(seed).items():
        chosen = random.Random(f"{seed} train {code}").sample(train, num_pairs[code])
        english_of: dict[str, str] = {}
        for split, split_texts in {**held_out, "train": chosen}.items():
            pairs = [tsv.Pair(realizer.sentence(drawn[text]), text) for text in split_texts]
            _check_function(code, pairs, english_of)
            tsv.write(out_dir / split / f"{code}-en.tsv.gz", pairs)
        logging.info("%s: %d training pairs", code, num_pairs[code])
    return num_pairs


def _check_function(code: str, pairs: list[tsv.Pair], english_of: dict[str, str]) -> None:
    for pair in pairs:
        known = english_of.setdefault(pair.source, pair.english)
        assert known == pair.english, f"{code}: {pair.source!r}: {known!r} and {pair.english!r}"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.INFO)
    num_pairs = write_corpus(pathlib.Path(_OUT.value), _SEED.value)
    logging.info("%s: %d training pairs in all", _OUT.value, sum(num_pairs.values()))


if __name__ == "__main__":
    app.run(main)
