import collections

import numpy as np
import pytest
import sentencepiece

from data_prep import encoding, vocabulary
from data_prep.config import BuildConfig

_ODD_TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "ﬁne １２ x\u3000y",
    "ქართული ✓ 漢字",
    "\u2581 is the mark itself",
    "a\u0301 combining",
    "👩‍👩‍👧 joined",
    "می\u200cخواهم",
    "x" * 3000,
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "source.model"
    text = [f"{word} {i} Haus {i * i}" for i in range(300) for word in ("ein", "das", "水と火")]
    config = BuildConfig(400, model_type=request.param, character_coverage=0.999)
    vocabulary.train(vocabulary.Side.SOURCE, text, config, path)
    return path


def _equal_to_sentencepiece(texts, model):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    expected = processor.encode(texts, add_eos=True)
    assert {len(ids) for ids in expected} > {1}
    pairs = [(text, text) for text in texts]
    batches = [pairs[i : i + 7] for i in range(0, len(pairs), 7)]
    found = []
    for batch, source, target in encoding.tokenize(iter(list(batches)), model, model):
        assert batch == batches.pop(0)
        found += [part.tolist() for part in np.split(source.ids, source.splits[1:-1])]
        np.testing.assert_array_equal(source.ids, target.ids)
    assert found == expected


def test_tokens_equal_sentencepieces_own(model):
    _equal_to_sentencepiece([*_ODD_TEXTS, *(f"das Haus {i} ist {i}" for i in range(100))], model)


def test_selecting_sentences():
    tokens = encoding.Tokens(np.array([5, 2, 2, 6, 7, 2]), np.array([0, 2, 3, 6]))
    assert tokens.lengths.tolist() == [2, 1, 3]
    kept = tokens.select(np.array([True, False, True]))
    assert (kept.ids.tolist(), kept.splits.tolist()) == ([5, 2, 6, 7, 2], [0, 2, 5])


def test_statistics_add_up():
    one = encoding.SideStatistics(collections.Counter({1: 2, 2: 1}), 3, 9, 1, 0)
    other = encoding.SideStatistics(collections.Counter({3: 4}), 10, 40, 0, 2)
    both = one + other + encoding.SideStatistics()
    assert both.lengths == {1: 2, 2: 1, 3: 4}
    assert both.num_pieces == 16
    assert (both.num_words, both.num_characters) == (13, 49)
    assert (both.num_byte_pieces, both.num_unknown) == (1, 2)
    assert encoding.Encoded(source=one) + encoding.Encoded((), other) == encoding.Encoded((), both)
