from bench import data_prep_memory
from data_prep import tsv
from data_prep.tsv import Pair


def test_copies_hold_the_same_words_in_another_order(tmp_path):
    pairs = [Pair(f"das Haus Nummer {i} ist alt", f"house number {i} is old") for i in range(50)]
    pairs.append(Pair("水と火と土と風", "one"))
    tsv.write(tmp_path / "de-en.tsv.gz", pairs)
    found = list(data_prep_memory._repeated(tmp_path / "de-en.tsv.gz", 3))
    assert found[:51] == pairs
    assert len(found) == 153
    for pair, original in zip(found, pairs * 3, strict=True):
        assert sorted(pair.source) == sorted(original.source)
        assert sorted(pair.english.split()) == sorted(original.english.split())
    # Only a few copies equal their original, because both moved words returned to their places.
    assert len(set(found)) > 140
