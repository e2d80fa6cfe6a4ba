import collections
import dataclasses
import math
import random

import numpy as np
import pytest
import sentencepiece

from data_prep import text_chunks, tsv, vocabulary
from data_prep.config import BuildConfig
from data_prep.tsv import Pair
from data_prep.vocabulary import Side
from lingvo_gshard.input import example_codec

_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "tra", "ste", "kon", "wor", "vim")


def _config(**changes):
    config = BuildConfig(source_vocab_size=400, target_vocab_size=300, character_coverage=1.0)
    return dataclasses.replace(config, **changes)


def _sentences(count):
    rng = random.Random(3)
    return [" ".join("".join(rng.choices(_SYLLABLES, k=3)) for _ in range(6)) for _ in range(count)]


def test_quotas_by_hand():
    # 32 ** (1/5) = 2, 1 ** (1/5) = 1, and 243 ** (1/5) = 3: shares 2/6, 1/6 and 3/6 of 240.
    assert vocabulary.quotas([32, 1, 243], 240, 5.0) == [80, 40, 120]
    # T=1 is proportional, and the budget never exceeds the number of sentences.
    assert vocabulary.quotas([30, 10, 0], 240, 1.0) == [30, 10, 0]


def test_copies_are_floor_or_ceil_and_right_on_average():
    digests = np.random.default_rng(1).integers(0, 2**64, 10_000, np.uint64)
    for rate in (0.3, 1.0, 2.6):
        copies = vocabulary.num_copies(digests, rate, seed=1)
        assert set(copies) == {math.floor(rate), math.ceil(rate)}
        assert abs(copies.mean() - rate) < 0.02
    first, other = (vocabulary.num_copies(digests, 0.5, seed) for seed in (1, 2))
    assert 4000 < (first != other).sum() < 6000


def test_sentencepiece_leaves_no_text_out(tmp_path):
    long = " ".join(["Langdokument"] * 600)  # 7799 bytes.
    parts = list(vocabulary.learnable(["kurz", "Ladebalken\u2585", long]))
    assert parts[:2] == ["kurz", "Ladebalken "]
    assert " ".join(part.strip() for part in parts[2:]) == long
    assert all(len(part.encode()) <= 4192 for part in parts)
    assert list(vocabulary.learnable(["\U00010348" * 1048])) == ["\U00010348" * 1048]  # 4192.

    texts = vocabulary.learnable([*_sentences(40), *["Ladebalken\u2585"] * 40, long])
    vocabulary.train(Side.SOURCE, texts, _config(), tmp_path / "source.model")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.model"))
    assert model.encode("Ladebalken Langdokument", out_type=str) == [
        "\u2581Ladebalken",
        "\u2581Langdokument",
    ]
    assert model.decode(model.encode("ein \u2585")) == "ein \u2585"


def test_draws_a_quota_of_the_selected_lines(tmp_path):
    writer = text_chunks.ChunkWriter(tmp_path, 1000)
    for i in range(400):
        pair = Pair(f"Satz {i}", f"sentence {i}")
        writer.add("train", "de", pair, pair)
    (chunk,) = writer.close()
    np.save(chunk.array_path("kept"), np.arange(400) < 200)
    path = tmp_path / "drawn.tsv"
    vocabulary.draw([chunk], 200, 500, 1, path)
    counts = collections.Counter(tsv.read(path))
    assert len(counts) == 200
    assert set(counts.values()) == {2, 3}
    assert 460 < counts.total() < 540


def test_target_text_that_many_languages_share_counts_once(tmp_path, monkeypatch):
    seen = {}

    def train(side, sentences, config, path, tokens):
        assert not tokens
        seen[side] = list(sentences)
        path.parent.mkdir(exist_ok=True)
        path.write_text(side)
        return 300

    monkeypatch.setattr(vocabulary, "train", train)
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_text(f"{name} eins\tone\n" * 2 + f"{name} zwei\ttwo\n")
    for side in Side:
        drawn = [("de", tmp_path / "a.tsv"), ("fr", tmp_path / "b.tsv")]
        made = vocabulary.train_drawn(drawn, _config(), tmp_path, side)
        assert (made.file.path, made.size) == (f"vocab/{side}.model", 300)
    assert seen["target"] == ["one", "two"]
    assert seen["source"] == ["a eins", "a eins", "a zwei", "b eins", "b eins", "b zwei"]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_models_are_reproducible_with_our_special_ids(tmp_path, model_type):
    paths = [tmp_path / "1.model", tmp_path / "2.model"]
    for path in paths:
        size = vocabulary.train(Side.SOURCE, _sentences(400), _config(model_type=model_type), path)
        assert size == 400
    assert paths[0].read_bytes() == paths[1].read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_file=str(paths[0]))
    found = (model.pad_id(), model.bos_id(), model.eos_id(), model.unk_id())
    assert found == (0, 1, 2, 3)
    assert found == (
        example_codec.PAD_ID,
        example_codec.BOS_ID,
        example_codec.EOS_ID,
        example_codec.UNK_ID,
    )
    # Nothing in the training text looks like this, yet it survives, as bytes.
    assert model.decode(model.encode("ქართული")) == "ქართული"


def test_a_small_text_gives_a_small_vocabulary(tmp_path):
    size = vocabulary.train(
        Side.SOURCE, ["ein Haus"] * 5, _config(source_vocab_size=5000), tmp_path / "m"
    )
    assert 264 < size < 300


def test_pieces_are_the_special_ids_the_tokens_the_bytes_and_those_of_the_text(tmp_path):
    for tokens in ((), ("<2de>", "<2fr>")):
        config = _config(source_vocab_size=4 + len(tokens) + 256 + 3)
        vocabulary.train(Side.SOURCE, ["a b"] * 9, config, tmp_path / "m", tokens)
        model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m"))
        pieces = [model.id_to_piece(i) for i in range(model.get_piece_size())]
        assert pieces[4 : 4 + len(tokens)] == list(tokens)
        assert pieces[4 + len(tokens)] == "<0x00>"
        assert set(pieces[-3:]) == {"▁", "a", "b"}


def test_a_size_that_cannot_hold_the_characters_is_refused(tmp_path):
    many = ["".join(chr(0x4E00 + 7 * i) for i in range(300))] * 3
    # 300 characters and the mark of a word's beginning, 256 bytes and 4 control pieces.
    with pytest.raises(ValueError, match="target vocabulary of 300 pieces .*: .* text need 561$"):
        vocabulary.train(Side.TARGET, many, _config(), tmp_path / "m")
