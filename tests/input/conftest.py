"""Prepared data folders: three languages of different sizes and lengths, and two corpora."""

import random

import pytest

from data_prep import pipeline, tsv
from data_prep.tsv import Document, Pair
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


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory):
    """A few long documents, "books", and many short ones, "notes", in several files of records."""
    folder = tmp_path_factory.mktemp("text")
    for split, num_books, num_notes in (("train", 9, 150), ("dev", 2, 11)):
        rng = random.Random(split)
        books = [Document(f"{split} \u6c34 {_sentence(rng, 300)} {i}") for i in range(num_books)]
        notes = [Document(f"{split} na\u00efve {_sentence(rng, 7)} {i}") for i in range(num_notes)]
        tsv.write(folder / "text" / split / "books.txt.gz", books)
        tsv.write(folder / "text" / split / "notes.txt.gz", notes)
    config = pipeline.BuildConfig(
        kind="text", text_vocab_size=400, pairs_per_chunk=40, pairs_per_shard=60
    )
    prepared.build(folder / "text", folder / "data", config)
    return str(folder / "data")
