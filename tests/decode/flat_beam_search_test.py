"""The flat beam against a textbook beam that reorders histories, and against exhaustive search.

B batch, k beam, V vocabulary, T steps, P places.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decode import flat_beam_search
from lingvo_gshard.decode.flat_beam_search import BeamSearch
from lingvo_gshard.layers.cache import write_at
from tests.layers import building
from tests.spmd import functions

BOS, EOS = 1, 2


def _decode_step(config, next_logits):
    """A model whose only memory of the past is a flat sequence that the mask selects from.

    `next_logits(model, history)` gets the tokens [B, k, T] of each hypothesis, BOS first and -1
    where none was written yet.
    """
    k, steps = config.beam_size, config.max_steps

    def step(model, ids, mask, index):
        flat = write_at(model.flat, tf.cast(ids, tf.float32) + 1.0, index * k)
        model = NestedMap(model, flat=flat)
        by_step = tf.reshape(mask * flat[:, None], [*ids.shape, steps, k])
        return next_logits(model, tf.cast(tf.reduce_sum(by_step, -1), tf.int32) - 1), model

    return step


def _search(config, next_logits, batch_size, **extra):
    """The hypotheses as numpy arrays; `extra` are tensors of the model's state."""

    @tf.function(jit_compile=True, autograph=False)
    def run():
        model = NestedMap(extra, flat=tf.zeros([batch_size, config.places]))
        found = flat_beam_search.search(
            config, _decode_step(config, next_logits), model, batch_size, lambda x, _: x
        )
        return found.ids, found.lengths, found.scores

    return [x.numpy() for x in run()]


def _peaked(tokens, vocab_size):
    """Logits [..., V] all but certain of one token."""
    return 20.0 * tf.one_hot(tokens, vocab_size)


def _best(ids_BKT, lengths_BK):
    return [row[0, : n[0]].tolist() for row, n in zip(ids_BKT, lengths_BK, strict=True)]


def test_plus_one():
    config = BeamSearch(3, 9)

    def rule(model, history):
        newest = tf.reduce_max(history, -1)
        after_bos = tf.where(newest == BOS, model.first[:, None], newest + 1)
        return _peaked(tf.where(newest == 9, EOS, after_bos), 12)

    ids, lengths, scores = _search(config, rule, 2, first=tf.constant([4, 7]))
    assert _best(ids, lengths) == [[4, 5, 6, 7, 8, 9, EOS], [7, 8, 9, EOS]]
    assert (scores[:, 0] > -1e-3).all() and (scores[:, 1] < -1).all()


def test_sum_of_all_before():
    def rule(model, history):
        total = tf.reduce_sum(tf.maximum(history, 0), -1)
        return _peaked(tf.where(total > 40, EOS, 3 + total % 20), 23)

    ids, lengths, _ = _search(BeamSearch(2, 12), rule, 1)
    want, total = [], 1
    while total <= 40:
        want.append(3 + total % 20)
        total += want[-1]
    assert _best(ids, lengths) == [[*want, EOS]]


def test_fibonacci():
    def rule(model, history):
        count = tf.reduce_sum(tf.cast(history >= 0, tf.int32), -1, keepdims=True)
        last = tf.gather(history, count - 1, batch_dims=2)[..., 0]
        before = tf.gather(history, tf.maximum(count - 2, 0), batch_dims=2)[..., 0]
        following = tf.where(count[..., 0] == 1, 3, last + before)  # 1 3 4 7 11 18
        return _peaked(tf.where(following > 40, EOS, following), 41)

    ids, lengths, _ = _search(BeamSearch(4, 9), rule, 1)
    assert _best(ids, lengths) == [[3, 4, 7, 11, 18, 29, EOS]]


@pytest.mark.parametrize(("alpha", "want"), [(0.0, [EOS]), (2.0, [4, 4, 4, EOS])])
def test_an_early_end_tempts_and_length_normalization_resists(alpha, want):
    """To end at once has probability 0.3; three 4s and the end have 0.6 * 0.6 * 0.6 * 0.97."""
    probabilities = np.full((2, 5), 0.01)
    probabilities[0, [EOS, 4]] = 0.3, 0.6
    probabilities[1, EOS] = 0.96
    log_p = tf.constant(np.log(probabilities), tf.float32)

    def rule(model, history):
        count = tf.reduce_sum(tf.cast(history >= 0, tf.int32), -1)
        return tf.gather(log_p, tf.cast(count > 3, tf.int32))

    ids, lengths, _ = _search(BeamSearch(2, 6, alpha), rule, 1)
    assert _best(ids, lengths) == [want]


def test_an_ending_counts_only_among_the_best_continuations():
    """To end at once, unlikely as it is, scores best; but two other tokens are likelier."""
    start = np.log([0.001, 0.001, 0.098, 0.3, 0.3, 0.3])
    after = np.log([0.2, 0.2, 0.2, 0.1, 0.1, 0.2])

    def rule(model, history):
        count = tf.reduce_sum(tf.cast(history >= 0, tf.int32), -1)
        return tf.gather(
            tf.constant(np.stack([start, after]), tf.float32), tf.cast(count > 1, tf.int32)
        )

    ids, lengths, scores = _search(BeamSearch(2, 3, 0.0), rule, 1)
    assert _best(ids, lengths) == [[3, EOS]]
    assert scores[0, 0] == pytest.approx(np.log(0.3 * 0.2), rel=1e-5)
    assert scores[0, 0] < np.log(0.098)


def test_a_hypothesis_has_its_least_length():
    def rule(model, history):
        return tf.tile(tf.constant(np.log([[[0.1, 0.1, 0.7, 0.1]]]), tf.float32), [1, 2, 1])

    for least in (1, 2, 4):
        _, lengths, _ = _search(BeamSearch(2, 4, 0.0, min_steps=least), rule, 1)
        assert lengths[0, 0] == least
    with pytest.raises(ValueError, match="min_steps must be 1 to max_steps 4, got 5"):
        BeamSearch(2, 4, min_steps=5)


def test_a_late_winner_is_waited_for():
    """All that is finished beats the active one as it stands; with length it will be the best."""
    start = np.array([0.149, 0.0, 0.55, 0.0, 0.301])
    later = np.array([[0.001, 0.001, 0.001, 0.001, 0.996], [0.001, 0.001, 0.996, 0.001, 0.001]])
    log_p = tf.constant(np.log(np.maximum([start, *later], 1e-9)), tf.float32)

    def rule(model, history):
        count = tf.reduce_sum(tf.cast(history >= 0, tf.int32), -1)
        state = tf.cast(count > 1, tf.int32) + tf.cast(count > 3, tf.int32)
        return tf.gather(log_p, state)

    ids, lengths, scores = _search(BeamSearch(1, 6, 2.0), rule, 1)
    assert _best(ids, lengths) == [[4, 4, 4, EOS]]
    want = (
        np.log(0.301 * 0.996**3) / (9 / 6) ** 2
    )  # above log 0.55, though log 0.301 / (7 / 6)^2 is below
    assert scores[0, 0] == pytest.approx(want, rel=1e-4)


def test_what_never_ends_is_cut_at_the_last_step():
    def rule(model, history):
        return _peaked(tf.reduce_max(history, -1) + 3, 15) - 2e9 * tf.one_hot(EOS, 15)

    ids, lengths, scores = _search(BeamSearch(3, 4), rule, 1)
    assert ids.tolist() == [[[4, 7, 10, 13], [0] * 4, [0] * 4]]
    assert lengths.tolist() == [[4, 0, 0]]
    assert abs(scores[0, 0]) < 1e-3 and (scores[0, 1:] < -1e8).all()


# --- against other searches ---


@dataclasses.dataclass(frozen=True)
class _RandomModel:
    """Logits that depend on every token before and on its position: no two histories agree."""

    table_TVD: np.ndarray
    out_BDV: np.ndarray

    @staticmethod
    def make(seed, batch_size, vocab_size, steps, dim=6):
        rng = np.random.default_rng(seed)
        return _RandomModel(
            rng.standard_normal((steps, vocab_size, dim)).astype("float32"),
            1.3 * rng.standard_normal((batch_size, dim, vocab_size)).astype("float32"),
        )

    def flat(self, model, history):
        """For the flat beam: tokens [B, k, T], -1 where there is none."""
        one_hot = tf.one_hot(history, self.table_TVD.shape[1])
        h = tf.einsum("BKTV,TVD->BKD", one_hot, tf.constant(self.table_TVD))
        return tf.einsum("BKD,BDV->BKV", tf.tanh(h), model.out)

    def log_probs(self, b, history):
        """For the oracle: a list of tokens, BOS first."""
        h = np.tanh(sum(self.table_TVD[t, token] for t, token in enumerate(history)))
        logits = (h @ self.out_BDV[b]).astype("float64")
        return logits - np.log(np.exp(logits).sum())


def _normalizer(config, length):
    return ((5 + length) / 6) ** config.length_norm_alpha


def _textbook(config, log_probs):
    """Beam search over explicit histories: [(score, tokens)], best first."""
    active, finished = [(0.0, [BOS])], []
    for step in range(config.max_steps):
        extended = []
        for log_p, history in active:
            following = log_probs(history)
            extended += [(log_p + following[v], [*history, v]) for v in range(len(following))]
        extended.sort(key=lambda x: -x[0])
        is_last = step + 1 == config.max_steps
        for log_p, history in extended if is_last else extended[: config.beam_size]:
            if history[-1] == EOS:
                finished.append((log_p / _normalizer(config, step + 1), history[1:]))
        finished = sorted(finished, key=lambda x: -x[0])[: config.beam_size]
        active = [x for x in extended if x[1][-1] != EOS][: config.beam_size]
    return finished


def _exhaustive(config, vocab_size, log_probs):
    """Every sequence of at most T tokens that ends with EOS, scored, best first."""
    words, scored = [v for v in range(vocab_size) if v != EOS], []
    for length in range(config.max_steps):
        for body in itertools.product(words, repeat=length):
            tokens = [*body, EOS]
            histories = [[BOS, *tokens[:i]] for i in range(len(tokens))]
            total = sum(log_probs(h)[v] for h, v in zip(histories, tokens, strict=True))
            scored.append((total / _normalizer(config, len(tokens)), tokens))
    return sorted(scored, key=lambda x: -x[0])[: config.beam_size]


def _check(found, wanted, beam_size):
    for ids, lengths, scores, want in zip(*found, wanted, strict=True):
        assert (lengths > 0).sum() == len(want)
        for i in range(beam_size):
            if i >= len(want):
                assert scores[i] < -1e8 and not ids[i].any()
                continue
            assert ids[i, : lengths[i]].tolist() == want[i][1]
            assert not ids[i, lengths[i] :].any()
            assert scores[i] == pytest.approx(want[i][0], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("beam_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("vocab_size", "steps", "alpha"), [(7, 6, 0.6), (4, 9, 0.0), (11, 5, 1.5)])
def test_equals_a_textbook_beam(beam_size, vocab_size, steps, alpha):
    batch_size, config = 5, BeamSearch(beam_size, steps, alpha)
    toy = _RandomModel.make(beam_size, batch_size, vocab_size, steps)
    found = _search(config, toy.flat, batch_size, out=tf.constant(toy.out_BDV))
    wanted = [
        _textbook(config, lambda history, b=b: toy.log_probs(b, history)) for b in range(batch_size)
    ]
    _check(found, wanted, beam_size)


def test_beams_branch_in_these_tests():
    """Hypotheses that share a prefix are among the finished: masks were copied, not only moved."""
    config = BeamSearch(4, 6)
    toy = _RandomModel.make(4, 5, 7, 6)
    wanted = [_textbook(config, lambda h, b=b: toy.log_probs(b, h)) for b in range(5)]
    shared = [
        len({tokens[0] for _, tokens in want if len(tokens) > 2}) < len(want) for want in wanted
    ]
    assert any(shared)


@pytest.mark.parametrize("seed", range(3))
def test_a_beam_wide_enough_is_exhaustive(seed):
    vocab_size, config = 4, BeamSearch(13, 3)  # 1 + 3 + 9 sequences
    toy = _RandomModel.make(seed, 2, vocab_size, 3)
    found = _search(config, toy.flat, 2, out=tf.constant(toy.out_BDV))
    wanted = [
        _exhaustive(config, vocab_size, lambda history, b=b: toy.log_probs(b, history))
        for b in range(2)
    ]
    assert [len(want) for want in wanted] == [13, 13]
    _check(found, wanted, 13)


def _partitioned(toy, config, num_partitions):
    parts = functions.partitioning(num_partitions)

    def fn(model):
        state = NestedMap(out=model.out, flat=parts.annotate(tf.zeros([8, config.places]), "B_"))
        found = flat_beam_search.search(
            config, _decode_step(config, toy.flat), state, 8, parts.annotate
        )
        return NestedMap(ids=found.ids, lengths=found.lengths, scores=found.scores)

    specs = NestedMap(out=functions.f32(toy.out_BDV.shape, "B__"))
    dims = {"ids": "B__", "lengths": "B_", "scores": "B_"}
    return building.compile_fn(fn, num_partitions, dims, model=specs)


def test_any_number_of_partitions_finds_the_same():
    config = BeamSearch(3, 6)
    toy = _RandomModel.make(9, 8, 7, 6)
    wanted = [_textbook(config, lambda h, b=b: toy.log_probs(b, h)) for b in range(8)]
    for num_partitions in (1, 2, 4, 8):
        executable = _partitioned(toy, config, num_partitions)
        found = executable(NestedMap(out=toy.out_BDV))
        _check([np.asarray(found[x]) for x in ("ids", "lengths", "scores")], wanted, 3)
        report = executable.report()  # Only whether to go on is asked of all.
        assert report.count("all-to-all") == report.count("all-gather") == 0
        assert report.count("all-reduce") <= 2


# --- parts ---


def test_top_k():
    x = np.random.default_rng(1).integers(0, 6, (4, 9)).astype("float32")
    values, indices = flat_beam_search.top_k(tf.constant(x), 5)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :5]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


@pytest.mark.parametrize("sizes", [(0, 5, 0.6), (4, 0, 0.6), (4, 5, -0.1)])
def test_a_search_that_makes_no_sense_is_refused(sizes):
    with pytest.raises(ValueError, match=f"BeamSearch: .* got {sizes[0]}, {sizes[1]}, {sizes[2]}"):
        BeamSearch(*sizes)
