"""BLEU by hand and by its signature."""

import math

import pytest

from lingvo_gshard.metrics.bleu import corpus_bleu


def test_equal_text_is_100_and_foreign_text_0():
    text = ["The cat sat on the mat .", "It rains all day long ."]
    assert corpus_bleu(text, text).score == pytest.approx(100)
    assert corpus_bleu(["x y z w v"], ["a b c d e"]).score == 0


def test_by_hand():
    """6 of 7 words, 4 of 6 pairs, 3 of 5 triples, 2 of 4 quadruples; no brevity penalty."""
    bleu = corpus_bleu(["a b c d e x g"], ["a b c d e f g"])
    want = 100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25
    assert bleu.score == pytest.approx(want)


def test_brevity():
    bleu = corpus_bleu(["a b c d e"], ["a b c d e f g"])
    assert bleu.score == pytest.approx(100 * math.exp(1 - 7 / 5))


def test_the_signature_says_how():
    signature = corpus_bleu(["a b c d"], ["a b c d"]).signature
    for part in ("nrefs:1", "tok:13a", "smooth:exp", "version:"):
        assert part in signature


@pytest.mark.parametrize(("ours", "theirs"), [([], []), (["a"], []), (["a", "b"], ["a"])])
def test_as_many_of_both_are_expected(ours, theirs):
    message = f"corpus_bleu: {len(ours)} hypotheses and {len(theirs)} references"
    with pytest.raises(ValueError, match=message):
        corpus_bleu(ours, theirs)
