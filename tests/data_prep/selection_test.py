import numpy as np

from data_prep import chunks, selection
from data_prep.cleaning import Rule
from data_prep.tsv import Pair


def _write(folder, split, name, pairs, pairs_per_chunk=100):
    writer = chunks.Writer(folder / split / name, pairs_per_chunk)
    for pair in pairs:
        writer.add(split, "de", pair, pair)
    return writer.close()


def test_a_chunk_ends_where_it_is_full(tmp_path):
    pairs = [Pair(f"s{i}", f"t{i}") for i in range(7)]
    made = _write(tmp_path, "train", "x", pairs, pairs_per_chunk=3)
    assert [chunk.num_pairs for chunk in made] == [3, 3, 1]
    assert [pair for chunk in made for pair in chunk.pairs()] == pairs
    assert made[0].digests().shape == (3, 3)


def test_of_equal_pairs_the_first_is_kept_over_all_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "_PAIRS_PER_RANGE", 60)
    rng = np.random.default_rng(2)
    pairs = [Pair(f"s{i}", f"t{j}") for i, j in rng.integers(0, 14, (1000, 2))]
    train = _write(tmp_path, "train", "x", pairs[:450])
    train += _write(tmp_path, "train", "y", pairs[450:])
    assert len(train) == 11
    selected = selection.select(train, [])
    kept = [pair for chunk in train for pair in chunk.kept_pairs()]
    assert kept == list(dict.fromkeys(pairs))
    assert sum(selected.num_kept) == len(kept)
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
    selected = selection.select(train, held_out)
    assert list(train[0].kept_pairs()) == [pairs[2]]
    assert selected.dropped == {("de", Rule.HELD_OUT): 3, ("de", Rule.DUPLICATE): 0}
    assert list(held_out[0].kept_pairs()) == list(held_out[0].pairs())
