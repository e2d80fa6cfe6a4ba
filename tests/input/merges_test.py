"""Tests for input/merges.py."""

import numpy as np
import pytest

from lingvo_gshard.input import merges
from lingvo_gshard.input.example_codec import Example
from lingvo_gshard.input.merges import MergeDropout
from lingvo_gshard.input.tokenizer import load_pair


def test_a_piece_is_undone_into_the_two_that_it_was_merged_from():
    pieces = ["<pad>", "<s>", "</s>", "<unk>", "<2de>", "bc", "abc", "ab", "abcab", "a", "b", "c"]
    parts = [[pieces[i] for i in pair if i >= 0] for pair in merges.parts_of(pieces)]
    merged = dict(zip(pieces, parts, strict=True))
    assert merged["bc"] == ["b", "c"]
    assert merged["abc"] == ["a", "bc"]  # `ab` was made later.
    assert merged["abcab"] == ["abc", "ab"]
    assert not any(merged[piece] for piece in ("<pad>", "</s>", "<2de>", "a", "c"))


@pytest.fixture(scope="module")
def tokenizers(data_dir):
    return load_pair(data_dir)


@pytest.fixture
def examples(tokenizers):
    texts = [f"br ke{'li' * n} mo nu trastekon" for n in range(1, 41)]
    sides = ([np.array(each.encode(text), np.int32) for text in texts] for each in tokenizers)
    return [Example(*pair) for pair in zip(*sides, strict=True)]


def test_the_text_stays_and_its_spelling_changes(tokenizers, examples):
    undone = MergeDropout(0.5, *tokenizers)(examples, np.random.default_rng(1))
    assert len(undone) == len(examples)
    for name, tokenizer in zip(("source_ids", "target_ids"), tokenizers, strict=True):
        longer = 0
        for before, after in zip(examples, undone, strict=True):
            ids, new = getattr(before, name), getattr(after, name)
            assert tokenizer.decode(new) == tokenizer.decode(ids) and new[-1] == ids[-1]
            assert new.dtype == np.int32
            longer += len(new) > len(ids)
        assert longer > 35


def test_as_many_merges_are_undone_as_asked_for(tokenizers, examples):
    def num_tokens(rate, seed=1):
        undone = MergeDropout(rate, *tokenizers)(examples, np.random.default_rng(seed))
        return sum(len(each.source_ids) for each in undone)

    parts = merges.parts_of(tokenizers[0].pieces(range(tokenizers[0].vocab_size)))
    merged = sum(int((parts[each.source_ids, 0] >= 0).sum()) for each in examples)
    few = num_tokens(0.01) - num_tokens(0.0)
    assert 0.2 * 0.01 * merged <= few <= 3 * 0.01 * merged + 3
    assert num_tokens(0.0) == sum(len(each.source_ids) for each in examples)
    assert num_tokens(0.0) < num_tokens(0.1) < num_tokens(0.5) < num_tokens(0.99)
    assert num_tokens(0.5, seed=2) != num_tokens(0.5, seed=3)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0])
def test_a_rate_is_a_probability(tokenizers, rate):
    with pytest.raises(ValueError, match=f"merge_dropout {rate}: expected 0 or more, and less th"):
        MergeDropout(rate, *tokenizers)
