"""A prepared data folder of three languages of different sizes and sentence lengths."""

import random

import pytest

from data_prep import pipeline, tsv
from data_prep.tsv import Pair
from tests.data_prep import prepared

_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "tra", "ste", "kon", "wor", "vim", "sal", "e")
TRAIN_SIZES = {"aa": 512, "br": 90, "cy": 16}


def _sentence(rng: random.Random, max_words: int) -> str:
    words = ("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(max_words))
    return " ".join(list(words)[: rng.randint(1, max_words)])


def _pairs(language: str, split: str, count: int) -> list[Pair]:
    rng = random.Random(f"{language} {split}")
    return [
        Pair(f"{language} {_sentence(rng, 9)} {i}", f"{split} {_sentence(rng, 7)} {i}")
        for i in range(count)
    ]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for language, count in TRAIN_SIZES.items():
        tsv.write(folder / "text/train" / f"{language}-en.tsv.gz", _pairs(language, "train", count))
    for language, count in {"aa": 41, "cy": 7}.items():
        tsv.write(folder / "text/dev" / f"{language}-en.tsv.gz", _pairs(language, "dev", count))
    config = pipeline.BuildConfig(source_vocab_size=420, target_vocab_size=390)
    prepared.build(folder / "text", folder / "data", config)
    return str(folder / "data")
