import errno

import numpy as np
import pytest

from data_prep import text_chunks
from data_prep.text_chunks import Chunk, ChunkWriter
from data_prep.tsv import Pair


def _write(folder, pairs, split="train", pairs_per_chunk=100):
    writer = ChunkWriter(folder, pairs_per_chunk)
    for pair in pairs:
        writer.add(split, "de", pair, pair)
    return writer.close()


def test_a_chunk_ends_where_it_is_full(tmp_path):
    pairs = [Pair(f"s{i}", f"t{i}") for i in range(7)]
    chunks = _write(tmp_path, pairs, pairs_per_chunk=3)
    assert [chunk.num_examples for chunk in chunks] == [3, 3, 1]
    assert [pair for chunk in chunks for pair in chunk.examples()] == pairs
    assert chunks[0].digests().shape == (3, 3)


def test_splits_and_languages_have_separate_chunks_in_one_folder(tmp_path):
    writer = ChunkWriter(tmp_path, 2)
    for i, (split, language) in enumerate([("train", "de"), ("dev", "de"), ("train", "fr")] * 2):
        pair = Pair(f"{i}", "x")
        writer.add(split, language, pair, pair)
    chunks = writer.close()
    assert [(one.split, one.language, one.num_examples) for one in chunks] == [
        ("train", "de", 2),
        ("dev", "de", 2),
        ("train", "fr", 2),
    ]
    assert len({chunk.path.parent for chunk in chunks}) == 1
    # A task that repeats another task's work leaves the other's files alone.
    (again,) = _write(tmp_path, [Pair("0", "x")])
    assert again.path.parent != chunks[0].path.parent


def test_digests_of_pairs_and_of_their_sides(tmp_path):
    pairs = [Pair("Haus", "A house!"), Pair("haus", "a House"), Pair("Haus", "a house")]
    (chunk,) = _write(tmp_path, pairs)
    digests = chunk.digests()
    assert digests.dtype == np.uint64
    assert len(set(digests[:, text_chunks.PAIR].tolist())) == 3
    # English is compared by its letters and digits, sources without case.
    assert len(set(digests[:, text_chunks.TARGET].tolist())) == 1
    assert len(set(digests[:, text_chunks.SOURCE].tolist())) == 1


def test_the_pair_is_written_and_the_normalized_one_is_digested(tmp_path):
    writer = ChunkWriter(tmp_path, 9)
    writer.add("dev", "de", Pair("ﬁ", "x"), Pair("fi", "x"))
    writer.add("dev", "de", Pair("fi", "x"), Pair("fi", "x"))
    (chunk,) = writer.close()
    assert list(chunk.examples()) == [Pair("ﬁ", "x"), Pair("fi", "x")]
    assert len(set(chunk.digests()[:, text_chunks.PAIR].tolist())) == 1


def test_kept_pairs_at_some_positions(tmp_path):
    pairs = [Pair(f"{i}", "x") for i in range(10, 16)]
    (written,) = _write(tmp_path, pairs)
    chunk = Chunk("train", "de", written.path, 6, start=10)
    is_kept = np.array([True, False, True, True, True, False])
    text_chunks.save_array(chunk.array_path("kept"), is_kept)
    assert [pair.source for pair in chunk.kept_examples()] == ["10", "12", "13", "14"]
    assert [pair.source for pair in chunk.kept_examples(range(12, 14))] == ["12", "13"]
    assert [pair.source for pair in chunk.kept_examples(range(0, 11))] == ["10"]
    assert [pair.source for pair in chunk.kept_examples(range(14, 99))] == ["14"]
    assert list(chunk.kept_examples(range(16, 20))) == []
    assert list(chunk.kept_examples(range(0, 10))) == []


def test_all_of_dev_is_kept(tmp_path):
    pairs = [Pair("a", "b"), Pair("a", "b")]
    (chunk,) = _write(tmp_path, pairs, split="dev")
    assert chunk.is_kept().tolist() == [True, True]
    assert list(chunk.kept_examples()) == pairs


def test_an_array_is_numpys_and_a_full_disk_is_named(tmp_path):
    digests = np.arange(2**14, dtype=np.uint64).reshape(-1, 2)
    text_chunks.save_array(tmp_path / "a.npy", digests)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), digests)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy", mmap_mode="r"), digests)
    text_chunks.save_array(tmp_path / "a.npy", digests.T)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), digests.T)

    with pytest.raises(OSError, match="No space left") as raised, open("/dev/full", "wb") as file:
        text_chunks._write_array(file, digests)
    assert raised.value.errno == errno.ENOSPC
