import collections

from data_prep import encoding


def test_statistics_add_up():
    one = encoding.SideStatistics(collections.Counter({1: 2, 2: 1}), 3, 9, 1, 0)
    other = encoding.SideStatistics(collections.Counter({3: 4}), 10, 40, 0, 2)
    both = one + other + encoding.SideStatistics()
    assert both.lengths == {1: 2, 2: 1, 3: 4}
    assert both.num_pieces == 16
    assert (both.num_words, both.num_characters) == (13, 49)
    assert (both.num_byte_pieces, both.num_unknown) == (1, 2)
    assert encoding.Encoded(source=one) + encoding.Encoded((), other) == encoding.Encoded((), both)
