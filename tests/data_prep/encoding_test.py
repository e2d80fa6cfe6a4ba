"""Expectations are counted by hand: the only pieces are single characters and bytes.

So "ab" is the mark of a word, a and b, and EOS: 4 pieces. Ids of bytes begin at 4.
"""

import collections
import dataclasses

import numpy as np
import pytest
import sentencepiece

from data_prep import encoding, text_chunks, vocabulary
from data_prep.config import BuildConfig
from data_prep.directions import Direction
from data_prep.encoding import SideStatistics
from data_prep.rules import Rule
from data_prep.shards import Shard
from data_prep.tsv import Pair
from lingvo_gshard.input.records import RecordSource
from lingvo_gshard.input.tokenizer import Tokenizer
from xla_spmd.files import digests

_INTO_ENGLISH = Direction("de")
_FROM_ENGLISH = Direction("de", is_reversed=True)
_EOS = 2
_FIRST_BYTE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A vocabulary of the special ids, the bytes, the mark of a word, a, b and c."""
    path = tmp_path_factory.mktemp("model") / "characters.model"
    size = 4 + 256 + 4
    config = BuildConfig(source_vocab_size=size, character_coverage=1.0)
    assert vocabulary.train(vocabulary.Side.SOURCE, ["abc ab a"] * 9, config, path) == size
    return path


@pytest.fixture(scope="module")
def ids(model):
    """The ids of the mark and the letters alone."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return {piece: processor.piece_to_id(piece) for piece in ("▁", "a", "b", "c")}


def _shard(folder, pairs, split="train"):
    writer = text_chunks.ChunkWriter(folder / "text", 1000)
    for pair in pairs:
        writer.add(split, "de", pair, pair)
    (chunk,) = writer.close()
    if split == "train":
        np.save(chunk.array_path("kept"), np.ones(len(pairs), bool))
    return Shard([chunk], range(len(pairs)))


def _encode(folder, model, pairs, split="train", direction=_INTO_ENGLISH, max_pieces=100):
    shard = _shard(folder, pairs, split)
    return encoding.encode(shard, direction, folder, "records/x", (model, model), max_pieces)


def _read(folder, encoded):
    source = RecordSource(folder, encoded.records)
    examples = source.read(np.arange(len(source)))
    return [(one.source_ids.tolist(), one.target_ids.tolist()) for one in examples]


def test_records_lengths_and_statistics_by_hand(tmp_path, model, ids):
    encoded = _encode(tmp_path, model, [Pair("ab", "a"), Pair("c ä", "b a")])
    mark, a, b, c = ids.values()
    two_bytes = [_FIRST_BYTE + 0xC3, _FIRST_BYTE + 0xA4]  # ä in UTF-8.
    assert _read(tmp_path, encoded) == [
        ([mark, a, b, _EOS], [mark, a, _EOS]),
        ([mark, c, mark, *two_bytes, _EOS], [mark, b, mark, a, _EOS]),
    ]
    assert encoded.source == SideStatistics(
        lengths=collections.Counter({4: 1, 6: 1}),
        num_words=3,
        num_characters=4,
        num_byte_pieces=2,
        num_unknown=0,
        num_bytes=6,
    )
    assert encoded.target == SideStatistics(
        lengths=collections.Counter({3: 1, 5: 1}), num_words=3, num_characters=3, num_bytes=4
    )
    assert encoded.dropped == {}
    records = encoded.records
    assert (records.num_source_tokens, records.num_target_tokens) == (10, 8)
    assert (records.num_examples, records.num_source_byte_tokens) == (2, 2)
    assert (records.num_target_byte_tokens, records.num_target_bytes) == (0, 4)
    assert [shard.num_target_tokens for shard in records.shards] == [8]


def test_the_files_are_described_and_lengths_take_a_byte_each(tmp_path, model):
    (shard,) = _encode(tmp_path, model, [Pair("ab", "a"), Pair("c", "b a")]).shards
    assert shard.file == digests.describe(tmp_path, "records/x.array_record")
    assert shard.lengths == digests.describe(tmp_path, "records/x.lengths.npy")
    lengths = np.load(tmp_path / "records/x.lengths.npy")
    assert lengths.dtype == np.uint8
    assert lengths.tolist() == [[4, 3], [3, 5]]


def test_lengths_above_255_take_two_bytes(tmp_path, model):
    _encode(tmp_path, model, [Pair("a" * 254, "b")], max_pieces=256)
    lengths = np.load(tmp_path / "records/x.lengths.npy")
    assert lengths.dtype == np.uint16
    assert lengths.tolist() == [[256, 3]]


@pytest.mark.parametrize(("max_pieces", "num_kept"), [(5, 3), (3, 1), (2, 0)])
def test_pairs_are_dropped_by_their_longer_side(tmp_path, model, max_pieces, num_kept):
    # The longer sides have 3, 4, 5 and 6 pieces, including EOS.
    pairs = [Pair("a", "b"), Pair("a", "bc"), Pair("abc", "b"), Pair("a", "abca")]
    encoded = _encode(tmp_path, model, pairs, max_pieces=max_pieces)
    assert encoded.records.num_examples == num_kept == len(_read(tmp_path, encoded))
    dropped = {("de", Rule.TOO_MANY_PIECES): 4 - num_kept} if num_kept < 4 else {}
    assert encoded.dropped == dropped
    # Dropped pairs do not count.
    assert encoded.source.num_words == num_kept
    assert encoded.source.lengths.total() == num_kept


def test_a_shard_may_become_empty(tmp_path, model):
    encoded = _encode(tmp_path, model, [Pair("abc", "abc")], max_pieces=2)
    assert encoded.records.num_examples == 0
    assert np.load(tmp_path / "records/x.lengths.npy").shape == (0, 2)
    assert (encoded.source, encoded.target) == (SideStatistics(), SideStatistics())


def test_dev_is_normalized_here_and_loses_nothing(tmp_path, model, ids):
    # Fullwidth letters: the chunks of dev and test have the original text.
    encoded = _encode(tmp_path, model, [Pair("ａ\u200bｂ", "c  a")], split="dev", max_pieces=1)
    mark, a, b, c = ids.values()
    assert _read(tmp_path, encoded) == [([mark, a, b, _EOS], [mark, c, mark, a, _EOS])]
    assert encoded.dropped == {}


def test_sources_and_targets_have_their_own_forms(tmp_path):
    models = (tmp_path / "source.model", tmp_path / "target.model")
    sides = (vocabulary.Side.SOURCE, vocabulary.Side.TARGET)
    config = BuildConfig(source_vocab_size=300, target_vocab_size=300, character_coverage=1.0)
    for side, path in zip(sides, models, strict=True):
        vocabulary.train(side, ["，½ x² ำ"] * 9, config, path)
    source, target = map(Tokenizer, models)

    shard = _shard(tmp_path, [Pair("，½ x² ำ", "e\u0301，½  x² ำ")], "train")
    read = ("，½ x² ำ", "é，½ x² ำ")
    for direction, written in ((_INTO_ENGLISH, read[1]), (_FROM_ENGLISH, read[0])):
        encoded = encoding.encode(shard, direction, tmp_path, "records/x", models, 100)
        ((source_ids, target_ids),) = _read(tmp_path, encoded)
        assert source.decode(source_ids) in (",1⁄2 x2 ํา", "é,1⁄2 x2 ํา")
        assert target.decode(target_ids) == written
        assert encoded.target.num_bytes == len(written.encode())


def test_a_token_is_part_of_the_source(tmp_path):
    path = tmp_path / "tokens.model"
    config = BuildConfig(source_vocab_size=300, character_coverage=1.0)
    vocabulary.train(vocabulary.Side.SOURCE, ["<2de> abc"] * 9, config, path, ["<2de>"])
    direction = dataclasses.replace(_FROM_ENGLISH, token="<2de>")
    encoded = _encode(tmp_path, path, [Pair("a", "b")], direction=direction)
    ((source_ids, target_ids),) = _read(tmp_path, encoded)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert processor.id_to_piece(source_ids[0]) == "<2de>"
    assert processor.decode(source_ids[:-1]) == "<2de> b"
    assert processor.decode(target_ids[:-1]) == "a"

    # Text that looks like the token stays text.
    encoded = _encode(tmp_path, path, [Pair("a", "<2de> b <2de>")], direction=direction)
    ((source_ids, _),) = _read(tmp_path, encoded)
    token = processor.piece_to_id("<2de>")
    assert [place for place, piece in enumerate(source_ids) if piece == token] == [0]
    assert processor.decode(source_ids[:-1]) == "<2de> <2de> b <2de>"


def test_the_batch_size_does_not_change_the_result(tmp_path, model, monkeypatch):
    pairs = [Pair("ab"[: 1 + i % 2], "c" * (1 + i % 3)) for i in range(7)]
    whole = _encode(tmp_path / "whole", model, pairs, max_pieces=4)
    monkeypatch.setattr(encoding, "_EXAMPLES_PER_BATCH", 2)
    in_batches = _encode(tmp_path / "batches", model, pairs, max_pieces=4)
    assert in_batches == whole
    assert in_batches.dropped == {("de", Rule.TOO_MANY_PIECES): 2}
