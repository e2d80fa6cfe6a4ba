"""A synthetic corpus for timing: Zipf-distributed words in languages of several sizes."""

import pathlib

import numpy as np

from data_prep import tsv

# The number of training pairs of each language.
SIZES = {"qaa": 24_000, "qab": 8_000, "qac": 1_000}
_NUM_WORDS = 5000
_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "tra", "ste", "kon", "wor", "vim", "säl", "é")


def write(folder: pathlib.Path) -> None:
    """Writes `folder/train/<lang>-en.tsv.gz`, with sentences of 4 to 39 words."""
    rng = np.random.default_rng(1)
    english_words = _vocabulary(rng)
    for code, size in SIZES.items():
        source_words = _vocabulary(rng)
        pairs = []
        for length in rng.integers(4, 40, size):
            ranks = np.minimum(rng.zipf(1.3, length), _NUM_WORDS) - 1
            pairs.append(tsv.Pair(" ".join(source_words[ranks]), " ".join(english_words[ranks])))
        tsv.write(folder / "train" / f"{code}-en.tsv.gz", pairs)


def _vocabulary(rng: np.random.Generator) -> np.ndarray:
    lengths = rng.integers(1, 5, _NUM_WORDS)
    return np.array(["".join(rng.choice(_SYLLABLES, length)) for length in lengths])
