"""The tokens that may be drawn, against Hugging Face's and against a loop over sorted tokens.

hugging_face/warpers.py computed the numbers of the file.

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


def _kept(scores_BV, top_k=None, top_p=None):
    """Returns bool [B, V]."""
    kept = sampling.may_be_drawn(tf.constant(scores_BV, tf.float32)[:, None], top_k, top_p)
    return kept.numpy()[:, 0]


def _softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("index", range(len(_SETTINGS)), ids=lambda i: str(_SETTINGS[i]))
def test_the_distribution_is_hugging_faces(index):
    temperature, top_k, top_p = _SETTINGS[index]
    scores = _STORED["logits"] / np.float32(temperature)
    wanted = _STORED["probabilities"][index]

    kept = _kept(
        scores,
        top_k=None if math.isnan(top_k) else int(top_k),
        top_p=None if math.isnan(top_p) else top_p,
    )

    # In the last row ten tokens have the same score at the top. Top-p keeps all of them.
    has_ties = np.arange(len(kept)) == len(kept) - 1
    if math.isnan(top_p):
        has_ties[:] = False
    np.testing.assert_array_equal(kept[~has_ties], wanted[~has_ties] > 0)
    assert (kept | (wanted == 0)).all()

    probabilities = _softmax(np.where(kept, scores, -np.inf))
    np.testing.assert_allclose(probabilities[~has_ties], wanted[~has_ties], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [None, 1, 7, 100])
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


def test_equal_tokens_stay_or_go_together():
    scores = np.array([[0.0] * 4, [1.0, 1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(_kept(scores, 1), [[1, 1, 1, 1], [1, 1, 0, 0]])
    np.testing.assert_array_equal(_kept(scores, None, 0.3), [[1, 1, 1, 1], [1, 1, 0, 0]])


def test_a_forbidden_token_has_no_share_of_the_mass():
    """Before the minimum length EOS has a log-probability of -1e9."""
    scores = np.array([[2.0, -1e9, 1.0, 0.0]])
    np.testing.assert_array_equal(_kept(scores, 3), [[1, 0, 1, 1]])
    np.testing.assert_array_equal(_kept(scores, None, 0.999), [[1, 0, 1, 1]])
    np.testing.assert_array_equal(_kept(scores / 1e-6, None, 0.5), [[1, 0, 0, 0]])
