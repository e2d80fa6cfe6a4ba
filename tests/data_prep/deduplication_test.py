import numpy as np

from data_prep import deduplication, text_chunks
from data_prep.cleaning import Rule
from data_prep.tsv import Pair


def _write(folder, split, name, pairs, pairs_per_chunk=100):
    writer = text_chunks.ChunkWriter(folder / split / name, pairs_per_chunk)
    for pair in pairs:
        writer.add(split, "de", pair, pair)
    return writer.close()


def _run(name, calls):
    return {key: call() for key, call in calls.items()}


def _select(folder, train, held_out=(), pairs_per_block=100):
    found = deduplication.select({"de": train}, held_out, folder / "x", pairs_per_block, _run)
    return found["de"]


def test_a_chunk_ends_where_it_is_full(tmp_path):
    pairs = [Pair(f"s{i}", f"t{i}") for i in range(7)]
    made = _write(tmp_path, "train", "x", pairs, pairs_per_chunk=3)
    assert [chunk.num_pairs for chunk in made] == [3, 3, 1]
    assert [pair for chunk in made for pair in chunk.pairs()] == pairs
    assert made[0].digests().shape == (3, 3)


def test_of_equal_pairs_the_first_is_kept_over_all_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(deduplication, "_PAIRS_PER_GROUP", 170)
    rng = np.random.default_rng(2)
    pairs = [Pair(f"s{i}", f"t{j}") for i, j in rng.integers(0, 14, (1000, 2))]
    train = _write(tmp_path, "train", "x", pairs[:450])
    train += _write(tmp_path, "train", "y", pairs[450:])
    assert len(train) == 11
    assert [len(group) for group in deduplication.groups(train)] == [2, 2, 2, 2, 1, 2]
    selected = _select(tmp_path, train)
    kept = [pair for chunk in train for pair in chunk.kept_pairs()]
    assert kept == list(dict.fromkeys(pairs))
    assert selected.block_sizes.total() == len(kept)
    assert selected.block_sizes[0] == sum(len(list(chunk.kept_pairs())) for chunk in train)
    assert selected.dropped == {("de", Rule.HELD_OUT): 0, ("de", Rule.DUPLICATE): 1000 - len(kept)}


def test_nothing_of_the_held_out_splits_stays_on_either_side(tmp_path):
    held_out = _write(tmp_path, "dev", "x", [Pair("Auch gehalten", "held out.")])
    pairs = [
        Pair("ein anderer", "Held OUT!"),
        Pair("AUCH gehalten", "something else"),
        Pair("auch, gehalten", "held"),
        Pair("ein anderer", "Held OUT!"),
    ]
    train = _write(tmp_path, "train", "x", pairs)
    selected = _select(tmp_path, train, held_out)
    assert list(train[0].kept_pairs()) == [pairs[2]]
    assert selected.dropped == {("de", Rule.HELD_OUT): 3, ("de", Rule.DUPLICATE): 0}
    assert list(held_out[0].kept_pairs()) == list(held_out[0].pairs())


def test_the_files_opened_grow_as_the_corpus(tmp_path, monkeypatch):
    """Ten times as many chunks, as large as they were, and as much memory."""
    monkeypatch.setattr(deduplication, "_PAIRS_PER_GROUP", 500)
    opened = []
    load = np.load

    def counted(path, **kwargs):
        opened.append(path)
        return load(path, **kwargs)

    monkeypatch.setattr(np, "load", counted)
    numbers = []
    for size in (500, 5000):
        pairs = [Pair(f"s{i}", f"t{i}") for i in range(size)]
        train = _write(tmp_path, "train", f"x{size}", pairs, pairs_per_chunk=5)
        opened.clear()
        assert _select(tmp_path, train).block_sizes.total() == size
        numbers.append(len(opened))
    # A chunk's digests and what is kept; a group's held-out digests of two kinds, and its sorted
    # ones; and each piece between groups and ranges twice.
    assert numbers == [2 * 100 + 2 + 1 + 2 * 1, 2 * 1000 + 10 * (2 + 1) + 2 * 10 * 10]


def test_nothing_is_changed_in_place(tmp_path):
    pairs = [Pair(f"s{i % 7}", "t") for i in range(20)]
    train = _write(tmp_path, "train", "x", pairs, pairs_per_chunk=6)
    _select(tmp_path, train)
    before = {path: path.stat().st_ino for path in (tmp_path / "train").rglob("*")}
    assert _select(tmp_path, train).block_sizes.total() == 7
    changed = [path for path, inode in before.items() if path.stat().st_ino != inode]
    assert sorted(changed) == sorted(chunk.array_path("kept") for chunk in train)
