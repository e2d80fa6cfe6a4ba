import dataclasses

import numpy as np

from data_prep import deduplication, text_chunks
from data_prep.rules import Rule
from data_prep.tsv import Document, Pair


def _write(folder, split, name, pairs, pairs_per_chunk=100, language="de"):
    writer = text_chunks.ChunkWriter(folder / split / name, pairs_per_chunk)
    for pair in pairs:
        writer.add(split, language, pair, pair)
    return writer.close()


def _run(name, calls):
    return {key: call() for key, call in calls.items()}


def _select(folder, train, held_out=(), pairs_per_block=100):
    found = deduplication.select({"de": train}, held_out, folder / "x", pairs_per_block, _run)
    return found["de"]


def test_three_groups_by_hand(tmp_path, monkeypatch):
    """Pairs A B, A C, B B, D in groups of two; blocks of three positions."""
    monkeypatch.setattr(deduplication, "_PAIRS_PER_GROUP", 2)
    pairs = [Pair(letter, f"English of {letter}") for letter in "ABACBBD"]
    chunks = _write(tmp_path, "train", "x", pairs, pairs_per_chunk=2)
    chunks = [dataclasses.replace(chunk, start=2 * i) for i, chunk in enumerate(chunks)]
    assert [len(group) for group in deduplication.groups(chunks)] == [1, 1, 1, 1]

    selected = _select(tmp_path, chunks, pairs_per_block=3)

    kept = [chunk.is_kept().tolist() for chunk in chunks]
    assert kept == [[True, True], [False, True], [False, False], [True]]
    # Positions 0 to 2 keep A and B, positions 3 to 5 keep C, and position 6 keeps D.
    assert selected.block_sizes == {0: 2, 1: 1, 2: 1}
    assert selected.dropped == {("de", Rule.HELD_OUT): 0, ("de", Rule.DUPLICATE): 3}

    # Each group has a sorted file, and each range of digests a file of repeated pairs.
    places = []
    for i, chunk in enumerate(chunks):
        digests, positions = np.load(tmp_path / f"x/de-{i:05d}.sorted.npy")
        assert digests.tolist() == sorted(chunk.digests()[:, text_chunks.PAIR].tolist())
        assert sorted(positions.tolist()) == list(range(chunk.num_examples))
        places += np.load(tmp_path / f"x/de-{i:05d}.repeated.npy").T.tolist()
    # A in the second group; the first and the second B in the third.
    assert sorted(places) == [[1, 0], [2, 0], [2, 1]]


def test_english_is_held_out_for_all_languages_and_a_source_for_its_own(tmp_path):
    held_out = _write(tmp_path, "dev", "x", [Pair("gleich", "held out")], language="de")
    pairs = [Pair("gleich", "something"), Pair("anders", "held out"), Pair("frei", "free")]
    train = {
        language: _write(tmp_path, "train", language, pairs, language=language)
        for language in ("de", "fr")
    }
    selected = deduplication.select(train, held_out, tmp_path / "x", 100, _run)
    assert train["de"][0].is_kept().tolist() == [False, False, True]
    assert train["fr"][0].is_kept().tolist() == [True, False, True]
    # A pair of another language is not a duplicate.
    assert selected["fr"].dropped == {("fr", Rule.HELD_OUT): 1, ("fr", Rule.DUPLICATE): 0}


def test_a_group_may_become_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(deduplication, "_PAIRS_PER_GROUP", 1)
    held_out = _write(tmp_path, "dev", "x", [Pair("q", "held out")])
    pairs = [Pair("a", "held out"), Pair("b", "c")]
    chunks = _write(tmp_path, "train", "x", pairs, pairs_per_chunk=1)
    chunks = [dataclasses.replace(chunk, start=i) for i, chunk in enumerate(chunks)]
    assert _select(tmp_path, chunks, held_out).block_sizes.total() == 1
    assert [chunk.is_kept().tolist() for chunk in chunks] == [[False], [True]]


def test_the_first_of_equal_pairs_is_kept_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(deduplication, "_PAIRS_PER_GROUP", 170)
    rng = np.random.default_rng(2)
    pairs = [Pair(f"s{i}", f"t{j}") for i, j in rng.integers(0, 14, (1000, 2))]
    train = _write(tmp_path, "train", "x", pairs[:450])
    train += _write(tmp_path, "train", "y", pairs[450:])
    assert len(train) == 11
    assert [len(group) for group in deduplication.groups(train)] == [2, 2, 2, 2, 1, 2]
    selected = _select(tmp_path, train)
    kept = [pair for chunk in train for pair in chunk.kept_examples()]
    assert kept == list(dict.fromkeys(pairs))
    assert selected.block_sizes.total() == len(kept)
    assert selected.block_sizes[0] == sum(len(list(chunk.kept_examples())) for chunk in train)
    assert selected.dropped == {("de", Rule.HELD_OUT): 0, ("de", Rule.DUPLICATE): 1000 - len(kept)}


def test_held_out_text_is_removed_from_both_sides(tmp_path):
    held_out = _write(tmp_path, "dev", "x", [Pair("Auch gehalten", "held out.")])
    pairs = [
        Pair("ein anderer", "Held OUT!"),
        Pair("AUCH gehalten", "something else"),
        Pair("auch, gehalten", "held"),
        Pair("ein anderer", "Held OUT!"),
    ]
    train = _write(tmp_path, "train", "x", pairs)
    selected = _select(tmp_path, train, held_out)
    assert list(train[0].kept_examples()) == [pairs[2]]
    assert selected.dropped == {("de", Rule.HELD_OUT): 3, ("de", Rule.DUPLICATE): 0}
    assert list(held_out[0].kept_examples()) == list(held_out[0].examples())


def test_nothing_is_changed_in_place(tmp_path):
    pairs = [Pair(f"s{i % 7}", "t") for i in range(20)]
    train = _write(tmp_path, "train", "x", pairs, pairs_per_chunk=6)
    _select(tmp_path, train)
    before = {path: path.stat().st_ino for path in (tmp_path / "train").rglob("*")}
    assert _select(tmp_path, train).block_sizes.total() == 7
    changed = [path for path, inode in before.items() if path.stat().st_ino != inode]
    assert sorted(changed) == sorted(chunk.array_path("kept") for chunk in train)


def test_texts_that_differ_in_a_sign_or_an_operator_are_not_held_out(tmp_path):
    held_out = [Pair("q", "Take 4 of 10, please"), Pair("r", "keep x < 3")]
    different = [Pair("a", "take -4 of 10"), Pair("b", "keep x >= 3"), Pair("c", "take 4.10")]
    copies = [Pair("d", "take 4 of 10; please!"), Pair("e", "Keep x<3.")]
    chunks = _write(tmp_path, "train", "x", [*different, *copies])
    _select(tmp_path, chunks, _write(tmp_path, "test", "x", held_out))
    assert chunks[0].is_kept().tolist() == [True, True, True, False, False]

    code = [Document("while (a[0] > 1) b--;"), Document("return a;")]
    others = [Document("while (a[0] > 1) b++;"), Document("return !a;"), Document("Return a")]
    chunks = _write(tmp_path, "train", "y", others, language="code")
    held_out = _write(tmp_path, "dev", "y", code, language="code")
    found = deduplication.select({"code": chunks}, held_out, tmp_path / "y", 100, _run)
    assert chunks[0].is_kept().tolist() == [True, True, False]
    assert found["code"].dropped["code", Rule.HELD_OUT] == 1
