"""The tokens that may be drawn, compared with Hugging Face and with a loop over sorted tokens.

hugging_face/warpers.py computed the expected numbers.

B rows, V vocabulary.
"""

import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.beam_search import sampling

_STORED = dict(np.load(pathlib.Path(__file__).parent / "hugging_face" / "warpers.npz"))
_SETTINGS = [tuple(row) for row in _STORED["settings"].tolist()]


def _kept(scores_BV, top_k=None, top_p=None, temperature=1.0, permitted_BV=True):
    """Returns bool [B, V]."""
    scores = tf.constant(scores_BV, tf.float32)[:, None]
    permitted = tf.broadcast_to(tf.constant(permitted_BV), np.shape(scores_BV))[:, None]
    return sampling.may_be_drawn(scores, permitted, temperature, top_k, top_p).numpy()[:, 0]


def _softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("index", range(len(_SETTINGS)), ids=lambda i: str(_SETTINGS[i]))
def test_the_distribution_is_hugging_faces(index):
    temperature, top_k, top_p = _SETTINGS[index]
    wanted = _STORED["probabilities"][index]

    kept = _kept(
        _STORED["logits"],
        top_k=None if math.isnan(top_k) else int(top_k),
        top_p=None if math.isnan(top_p) else top_p,
        temperature=temperature,
    )

    # In the last row, ten tokens share the highest score. Our top-p keeps all of them.
    has_ties = np.arange(len(kept)) == len(kept) - 1
    if math.isnan(top_p):
        has_ties[:] = False
    np.testing.assert_array_equal(kept[~has_ties], wanted[~has_ties] > 0)
    assert (kept | (wanted == 0)).all()

    scores = _STORED["logits"] / np.float32(temperature)
    probabilities = _softmax(np.where(kept, scores, -np.inf))
    np.testing.assert_allclose(probabilities[~has_ties], wanted[~has_ties], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.999])
@pytest.mark.parametrize("top_k", [None, 7, 100])
def test_a_loop_over_the_sorted_tokens_keeps_the_same(top_k, top_p):
    scores = 3 * np.random.default_rng(1).standard_normal((5, 100))
    kept = _kept(scores, top_k, top_p)
    for row, row_scores in enumerate(scores):
        best_first = np.argsort(-row_scores)[:top_k]
        probabilities = _softmax(row_scores[best_first])
        wanted = []
        for token, before in zip(best_first, np.cumsum(probabilities) - probabilities, strict=True):
            if before < top_p:
                wanted.append(token)
        assert np.flatnonzero(kept[row]).tolist() == sorted(wanted)


def test_equal_tokens_are_kept_or_dropped_together():
    scores = np.array([[0.0] * 4, [1.0, 1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(_kept(scores, 1), [[1, 1, 1, 1], [1, 1, 0, 0]])
    np.testing.assert_array_equal(_kept(scores, None, 0.3), [[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize("temperature", [1e-30, 1.0, 1e30])
def test_a_forbidden_token_is_never_kept_and_does_not_count(temperature):
    scores = np.array([[2.0, 3.0, 1.0, 0.0]])
    permitted = np.array([[True, False, True, True]])

    def kept(top_k=None, top_p=None):
        return _kept(scores, top_k, top_p, temperature, permitted)[0].tolist()

    assert kept(3) == [True, False, True, True]
    assert kept(2) == [True, False, True, False]
    assert kept(4, 1.0) == [True, False, True, True]
    # Of three tokens, one has all the mass, or each has a third.
    if temperature < 1:
        assert kept(None, 0.999) == [True, False, False, False]
    if temperature > 1:
        assert kept(None, 0.5) == [True, False, True, False]
        assert kept(None, 0.999) == [True, False, True, True]
