import collections

from data_prep import encoding, vocabulary
from data_prep.config import BuildConfig


def test_statistics_add_up():
    one = encoding.SideStatistics(collections.Counter({1: 2, 2: 1}), 3, 9, 1, 0)
    other = encoding.SideStatistics(collections.Counter({3: 4}), 10, 40, 0, 2)
    both = one + other + encoding.SideStatistics()
    assert both.lengths == {1: 2, 2: 1, 3: 4}
    assert both.num_pieces == 16
    assert (both.num_words, both.num_characters) == (13, 49)
    assert (both.num_byte_pieces, both.num_unknown) == (1, 2)
    assert encoding.Encoded(source=one) + encoding.Encoded((), other) == encoding.Encoded((), both)


def test_a_new_vocabulary_under_an_old_name_is_read(tmp_path):
    """As by a cluster's worker that outlives a build."""
    path, text = tmp_path / "source.model", [f"Satz {i} hier" for i in range(300)]
    for size in (300, 280):
        config = BuildConfig(source_vocab_size=size)
        vocabulary.train(vocabulary.Side.SOURCE, text, config, path)
        read = encoding._vocabulary(path)
        assert read.processor.get_piece_size() == len(read.is_byte) == size
