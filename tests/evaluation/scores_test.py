"""BLEU and chrF by hand and by their signatures."""

import math

import pytest

from lingvo_gshard.evaluation.scores import corpus_bleu, corpus_chrf


def test_equal_text_is_100_and_foreign_text_0():
    text = ["The cat sat on the mat .", "It rains all day long ."]
    for metric in (corpus_bleu, corpus_chrf):
        assert metric(text, text).value == pytest.approx(100)
        assert metric(text, text).margin == pytest.approx(0, abs=1e-9)
        assert metric(["x y z w v"], ["a b c d e"]).value == 0


def test_bleu_by_hand():
    """6 of 7 words, 4 of 6 pairs, 3 of 5 triples, 2 of 4 quadruples; no brevity penalty."""
    bleu = corpus_bleu(["a b c d e x g"], ["a b c d e f g"])
    want = 100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** 0.25
    assert bleu.value == pytest.approx(want)


def test_brevity():
    bleu = corpus_bleu(["a b c d e"], ["a b c d e f g"])
    assert bleu.value == pytest.approx(100 * math.exp(1 - 7 / 5))


def test_chrf_by_hand():
    """Precisions 3/4 of letters, 1/3 of pairs, 0 of triples, recalls 1, 1/2, 0; F2 of the means."""
    precision, recall = (3 / 4 + 1 / 3) / 3, (1 + 1 / 2) / 3
    want = 100 * 5 * precision * recall / (4 * precision + recall)
    assert corpus_chrf(["abxc"], ["abc"]).value == pytest.approx(want)


def test_the_margin_shrinks_as_the_root_of_the_corpus():
    """Half of the sentences are right: the more there are, the surer their score."""
    right, wrong = "a b c d e f", "g h i j k l"
    margins = [corpus_bleu([right, right] * n, [right, wrong] * n).margin for n in (25, 100)]
    assert margins[0] / margins[1] == pytest.approx(2, rel=0.25)
    assert 5 < margins[1] < 15  # 1.96 * sqrt(0.5 * 0.5 / 200) is 7 % of right sentences.


def test_a_corpus_that_is_mostly_wrong_has_a_margin():
    """Some of the bootstrap's samples score 0, others not."""
    for metric in (corpus_bleu, corpus_chrf):
        score = metric(["x"] * 9 + ["a b c d"], ["b"] * 9 + ["a b c d"])
        assert 0 < score.margin < 100


@pytest.mark.parametrize(("metric", "own"), [(corpus_bleu, "tok:13a"), (corpus_chrf, "nc:6")])
def test_the_signature_says_how(metric, own):
    signature = metric(["a b c d"], ["a b c d"]).signature
    for part in ("nrefs:1", "bs:1000", "seed:12345", own, "version:"):
        assert part in signature


@pytest.mark.parametrize(("ours", "theirs"), [([], []), (["a"], []), (["a", "b"], ["a"])])
def test_as_many_of_both_are_expected(ours, theirs):
    message = f"{len(ours)} hypotheses and {len(theirs)} references"
    with pytest.raises(ValueError, match=f"corpus_bleu: {message}"):
        corpus_bleu(ours, theirs)
    with pytest.raises(ValueError, match=f"corpus_chrf: {message}"):
        corpus_chrf(ours, theirs)
