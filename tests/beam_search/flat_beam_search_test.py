"""The flat beam, compared with a textbook beam that reorders histories and an exhaustive search.

B batch, k beam, V vocabulary, T steps, P places.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import BeamSearch, Requests, Rules, Stopping
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.slices import write_at
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd.executable import compile_program
from tests import exhaustive
from tests.beam_search import textbook
from tests.beam_search.textbook import BOS, EOS, RandomModel
from tests.layers import building
from tests.spmd import functions
from tests.xla_spmd import compilers
from xla_spmd.mesh import Mesh


def _decode_step(config, next_logits):
    """Returns a model whose only memory is a flat sequence, from which the mask selects.

    `next_logits(model, history)` gets the tokens [B, k, T] of each hypothesis: BOS first, and -1
    for tokens that are not written yet.
    """
    k, steps = config.beam_size, config.max_steps

    def step(model, ids, mask, index):
        flat = write_at(model.flat, tf.cast(ids, tf.float32) + 1.0, index * k)
        model = NestedMap(model, flat=flat)
        by_step = tf.reshape(mask * flat[:, None], [*ids.shape, steps, k])
        return next_logits(model, tf.cast(tf.reduce_sum(by_step, -1), tf.int32) - 1), model

    return step


def _search(config, next_logits, batch_size, min_steps=1, **extra):
    """Returns ids, lengths and scores as numpy arrays; `extra` is added to the model's state."""

    @tf.function(jit_compile=True, autograph=False)
    def run():
        model = NestedMap(extra, flat=tf.zeros([batch_size, config.max_steps * config.beam_size]))
        limits = (tf.fill([batch_size], n) for n in (min_steps, config.max_steps))
        requests = Requests(*limits, tf.constant([0, 0]))
        step = _decode_step(config, next_logits)
        # Searches this short have one stage, and so never grow.
        found = flat_beam_search.search(config, step, model, requests, lambda x, _: x, None)
        return found.ids, found.lengths, found.scores

    return [x.numpy() for x in run()]


def _peaked(tokens, vocab_size):
    """Returns logits [..., V] that are nearly certain of one token."""
    return 20.0 * tf.one_hot(tokens, vocab_size)


def test_a_hypothesis_without_eos_is_cut_at_the_last_step():
    def rule(model, history):
        return _peaked(tf.reduce_max(history, -1) + 3, 15) - 2e9 * tf.one_hot(EOS, 15)

    ids, lengths, scores = _search(BeamSearch(3, 4), rule, 1)
    assert ids.tolist() == [[[4, 7, 10, 13], [0] * 4, [0] * 4]]
    assert lengths.tolist() == [[4, 0, 0]]
    assert abs(scores[0, 0]) < 1e-3 and (scores[0, 1:] < -1e8).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beam_size", "temperature", "rules"),
    [(1, None, Rules.WU), (1, 0.7, Rules.WU), (3, None, Rules.WU), (3, None, Rules.HUGGING_FACE)],
)
def test_an_example_without_finite_logits_has_no_hypothesis(beam_size, temperature, rules):
    """Hypotheses that ended before stay, and so do all hypotheses of the last example."""
    from_third_step = tf.constant([np.nan, np.inf, -np.inf, 0.0], tf.float32)[:, None, None]

    def rule(model, history):
        count = tf.reduce_sum(tf.cast(history >= 0, tf.int32), -1)[..., None]  # [B, k, 1]
        logits = _peaked(tf.where(count[..., 0] == 4, EOS, 5), 7)
        return tf.where((count > 2) & (from_third_step != 0.0), from_third_step, logits)

    config = BeamSearch(beam_size, 6, 0.0, rules=rules, temperature=temperature)
    ids, lengths, scores = _search(config, rule, 4)
    assert lengths[3, 0] == 4 and np.isfinite(scores).all()
    assert beam_size > 1 or not lengths[:3].any()
    for length, tokens in zip(lengths[:3].ravel(), ids[:3].reshape(-1, 6), strict=True):
        assert length <= 2 and (length == 0 or tokens[length - 1] == EOS)


@pytest.mark.parametrize("stopping", Stopping)
def test_a_search_ends_once_no_hypothesis_is_active(stopping):
    """The forced EOS ends the only one, although a beam of 3 has room for others."""
    config = BeamSearch(3, 8, stopping=stopping)
    last_step = []

    @tf.function(autograph=False)
    def run():
        def step(model, ids, mask, index):
            tf.py_function(lambda i: last_step.append(int(i)), [index], [])
            return tf.zeros([1, 3, 5]), model

        requests = Requests(
            tf.constant([1]), tf.constant([8]), tf.zeros([2], tf.int32), tf.constant([EOS])
        )
        found = flat_beam_search.search(
            config, step, NestedMap(), requests, lambda x, _: x, lambda state, _: state
        )
        return found.ids, found.lengths

    ids, lengths = run()
    assert lengths.numpy().tolist() == [[1, 0, 0]] and ids[0, 0, 0] == EOS
    assert last_step == [0]


# --- against other searches ---

_VOCAB, _STEPS = 7, 6
_LENGTHS = [5, 3, 1, 4, 2, 5, 4, 1]  # The sources' lengths.
_B = len(_LENGTHS)
# Every beam size from 1 to 8, each with different options.
_CONFIGS = {
    1: BeamSearch(1, _STEPS),
    2: BeamSearch(2, _STEPS, 0.0),
    3: BeamSearch(3, _STEPS, 1.0, coverage_weight=0.4, min_stage_places=6),
    4: BeamSearch(4, _STEPS, num_best=1),
    5: BeamSearch(5, _STEPS, 1.5),
    6: BeamSearch(6, _STEPS, num_best=3, coverage_weight=0.2, min_stage_places=12),
    7: BeamSearch(7, _STEPS, 0.3, num_best=2),
    8: BeamSearch(8, _STEPS, min_stage_places=1),
}


def _random_model(seed, vocab_size=_VOCAB, steps=_STEPS):
    return RandomModel.make(seed, _LENGTHS, vocab_size, steps)


def _asked(seed, free=False):
    """Returns the limits of every example as arrays; with `free`, no limits."""
    rng = np.random.default_rng(seed)
    if free:
        return NestedMap(
            min_steps=np.ones(_B, np.int32),
            max_steps=np.full(_B, _STEPS, np.int32),
            seed=np.array([seed, 0], np.int32),
        )
    longest = rng.integers(1, _STEPS + 1, _B).astype(np.int32)
    shortest = rng.integers(1, longest + 1).astype(np.int32)
    return NestedMap(min_steps=shortest, max_steps=longest, seed=np.array([seed, 1], np.int32))


def _program(config, partitions, vocab_size=_VOCAB):
    """Compiles `_exported`, which takes the RandomModel's arrays and the requests."""
    return compile_program(_exported(config, partitions, vocab_size))


def _exported(config, partitions, vocab_size=_VOCAB):
    """Returns the program that searches with a RandomModel.

    `partitions` is a Partitioning, or the number of devices for the paper's table.
    """
    parts = functions.partitioning(partitions) if isinstance(partitions, int) else partitions

    def fn(model, asked):
        state = textbook.flat_state(config, model)
        state.flat = Annotator(parts).annotate(state.flat, "B__")
        model_step = textbook.flat_step(config, model)

        def step(*args):
            logits, state = model_step(*args)
            return Annotator(parts).annotate(logits, "ULV"), state

        found = flat_beam_search.search(
            config, step, state, Requests(**asked), Annotator(parts).annotate, textbook.flat_grow
        )
        return NestedMap({f.name: getattr(found, f.name) for f in dataclasses.fields(found)})

    model = _random_model(0, vocab_size, config.max_steps).tensors()
    rows = ("source_BSD", "real_BS")
    specs = NestedMap(
        {
            name: functions.f32(x.shape, "B__"[: x.ndim] if name in rows else "___"[: x.ndim])
            for name, x in model.items()
        }
    )
    asked = NestedMap(
        {
            name: TensorSpec(x.shape, "int32", "B_"[: x.ndim] if name != "seed" else "_")
            for name, x in _asked(0).items()
        }
    )
    dims = {"ids": "B__", "lengths": "B_", "scores": "B_", "token_log_probs": "B__"}
    dims["attention"] = "B___"
    return building.export_fn(fn, parts, dims, model=specs, asked=asked)


_one_device = functools.cache(lambda config: _program(config, 1))


def _textbook(config, toy, asked):
    return [
        textbook.search(config, toy, b, asked.min_steps[b], asked.max_steps[b]) for b in range(_B)
    ]


def _check(found, wanted):
    """Compares n-best lists: ids, lengths, scores, tokens' log-probabilities, attention."""
    found = found.Transform(np.asarray)
    for b, want in enumerate(wanted):
        assert (found.lengths[b] > 0).sum() == len(want)
        assert (found.scores[b, len(want) :] < -1e8).all() and not found.ids[b, len(want) :].any()
        for i, hypothesis in enumerate(want):
            length = found.lengths[b, i]
            assert tuple(found.ids[b, i, :length]) == hypothesis.tokens
            assert not found.ids[b, i, length:].any()
            assert not found.token_log_probs[b, i, length:].any()
            np.testing.assert_allclose(found.scores[b, i], hypothesis.score, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(
                found.token_log_probs[b, i, :length], hypothesis.token_log_probs, 1e-4, 1e-4
            )
            np.testing.assert_allclose(
                found.attention[b, i, :length], hypothesis.attention, 1e-4, 1e-5
            )


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from([3, 8]), st.integers(0, 10**6), st.booleans())
def test_equals_a_textbook_beam(beam_size, seed, free):
    _check_against_the_textbook(beam_size, seed, free)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 8), st.integers(0, 10**6), st.booleans())
def test_every_beam_size_equals_a_textbook_beam(beam_size, seed, free):
    _check_against_the_textbook(beam_size, seed, free)


def _check_against_the_textbook(beam_size, seed, free):
    config, toy, asked = _CONFIGS[beam_size], _random_model(seed), _asked(seed, free)
    found = _one_device(config)(toy.tensors(), asked)
    _check(found, _textbook(config, toy, asked))


def test_the_random_models_make_beams_branch_and_end_early():
    """Some hypotheses share their first tokens, so masks are copied; their lengths differ."""
    asked = _asked(4, free=True)
    wanted = _textbook(_CONFIGS[8], _random_model(4), asked)
    starts = [{h.tokens[0] for h in want if len(h.tokens) > 2} for want in wanted]
    assert any(0 < len(s) < 8 for s in starts)
    assert {len(h.tokens) for want in wanted for h in want} >= {3, 4, 5, 6}


def test_a_wide_beam_is_exhaustive():
    vocab_size, config = 4, BeamSearch(13, 3)  # 1 + 3 + 9 sequences
    run = _program(config, 1, vocab_size)
    for seed in range(3):
        toy, asked = _random_model(seed, vocab_size, 3), _asked(0, free=True)
        asked.max_steps = np.full(_B, 3, np.int32)
        found = run(toy.tensors(), asked).Transform(np.asarray)
        for b in range(_B):
            want = textbook.exhaustive(config, toy, b)
            assert len(want) == 13
            got = [tuple(row[:n]) for row, n in zip(found.ids[b], found.lengths[b], strict=True)]
            assert got == [tokens for _, tokens in want]
            np.testing.assert_allclose(found.scores[b], [score for score, _ in want], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_partitions", [8, *(pytest.param(n, marks=exhaustive.RARE) for n in (2, 4))]
)
def test_partitioned_search_equals_the_textbook(num_partitions):
    config, toy, asked = _CONFIGS[3], _random_model(9), _asked(9)
    run = _program(config, num_partitions)
    _check(run(toy.tensors(), asked), _textbook(config, toy, asked))
    report = run.report()  # Partitions exchange only the decision to continue.
    assert report.count("all-to-all") == report.count("all-gather") == 0
    assert report.count("all-reduce") == len(config.stage_ends)


@pytest.mark.slow
def test_an_example_with_max_steps_0_gets_no_hypothesis():
    toy, asked = _random_model(3), _asked(3, free=True)
    asked.max_steps[[0, 5]] = 0
    found = _one_device(_CONFIGS[8])(toy.tensors(), asked).Transform(np.asarray)
    assert not found.lengths[[0, 5]].any() and not found.ids[[0, 5]].any()
    assert (found.lengths[[1, 2, 3, 4]] > 0).all()


# --- beams of one ---


def _log_probs(toy, b, tokens):
    cache, found = 0.0, []
    for step, token in enumerate([BOS, *tokens]):
        cache = cache + toy.table_TVD[step, [token]]
        found.append(toy.step(b, cache)[0][0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "truncated"),
    [
        (2.0**-126, {}),
        (1e-9, {"top_k": 4, "top_p": 1e-3}),
    ],
)
def test_the_lowest_temperatures_are_greedy_decoding(temperature, truncated):
    """Even with a minimum length, and after hundreds of tokens."""
    steps = 300
    logits_BTV = 5 * np.random.default_rng(1).standard_normal([2, steps + 1, 9])
    logits_BTV[:, :, EOS] += np.where(np.arange(steps + 1) < steps - 20, 4, -100)
    logits_BTV = tf.constant(logits_BTV, tf.float32)

    def rule(model, history):
        count = tf.reduce_sum(tf.cast(history >= 0, tf.int32), -1)  # [B, 1]
        return tf.gather(logits_BTV, count - 1, batch_dims=1)

    greedy = BeamSearch(1, steps, 0.0, min_stage_places=steps)
    sampled = dataclasses.replace(greedy, temperature=temperature, **truncated)
    wanted = _search(greedy, rule, 2, min_steps=steps - 30)
    found = _search(sampled, rule, 2, min_steps=steps - 30)
    assert (wanted[1] >= steps - 30).all() and len(set(wanted[0].flat)) > 5
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("temperature", "truncated"),
    [
        (1e-9, {}),
        pytest.param(1e30, {}, marks=pytest.mark.slow),
        (1e9, {"top_k": 4, "top_p": 0.9}),
    ],
)
def test_forbidden_tokens_are_never_drawn(temperature, truncated):
    """Neither EOS before the minimum length, nor tokens that the model itself excludes."""
    logits_V = tf.constant([0.0, -np.inf, 9.0, 1.0, 2.0, -1e9], tf.float32)
    config = BeamSearch(1, 6, 0.0, temperature=temperature, **truncated)
    ids, lengths, scores = _search(
        config, lambda *_: tf.tile(logits_V[None, None], [8, 1, 1]), 8, min_steps=5
    )
    assert (lengths >= 5).all() and (ids[:, 0, :4] != EOS).all()
    assert not np.isin(ids, [1, 5]).any() and np.isfinite(scores).all()


@pytest.mark.parametrize("rules", Rules)
def test_the_last_token_of_a_sample_is_drawn_like_the_others(rules):
    """By either rules: a sample that is cut does not end with an EOS that was never drawn."""
    rows = 2000
    probabilities_V = np.array([0.05, 0.05, 0.5, 0.3, 0.1])  # EOS has 0.5.
    logits = tf.constant(np.log(probabilities_V), tf.float32)
    config = BeamSearch(1, 2, temperature=1.0, rules=rules)
    ids, lengths, _ = _search(config, lambda *_: tf.tile(logits[None, None], [rows, 1, 1]), rows)

    is_cut_or_ends_last = lengths[:, 0] == 2
    for tokens in (ids[:, 0, 0], ids[is_cut_or_ends_last, 0, 1]):
        expected = len(tokens) * probabilities_V
        counts = np.bincount(tokens, minlength=5)
        assert ((counts - expected) ** 2 / expected).sum() < 23.6  # p = 0.0001 at 4 degrees


def test_a_last_token_that_top_k_excludes_is_not_drawn():
    logits = tf.constant([4.0, 2.0, 0.0, 3.0], tf.float32)  # EOS is the least probable.
    config = BeamSearch(1, 3, temperature=1.0, top_k=2)
    ids, lengths, _ = _search(config, lambda *_: tf.tile(logits[None, None], [50, 1, 1]), 50)
    assert set(ids.flat) == {0, 3} and (lengths == 3).all()


def test_the_coverage_penalty_counts_for_hypotheses_without_eos():
    """They compete with ended ones by transformers' rules: scores are log P / length + cp."""
    probabilities = np.array([0.1, 0.2, 0.3, 0.25, 0.15])
    attention = np.array([0.6, 0.4])
    weight = 0.2
    logits = tf.constant(np.log(probabilities), tf.float32)
    config = BeamSearch(2, 2, 1.0, coverage_weight=weight, rules=Rules.HUGGING_FACE)
    ids, _, scores = _search(
        config,
        lambda *_: tf.tile(logits[None, None], [1, 2, 1]),
        1,
        attention=tf.tile(tf.constant(attention, tf.float32)[None, None], [1, 2, 1]),
        source_real=tf.ones([1, 2]),
    )
    assert ids[0].tolist() == [[3, EOS], [3, 3]]
    coverage_penalty = weight * np.log(np.minimum(2 * attention, 1.0)).sum()
    log_probs = np.log([0.25 * 0.3, 0.25 * 0.25])
    np.testing.assert_allclose(scores[0], log_probs / 2 + coverage_penalty, rtol=1e-5)


def test_the_highest_temperatures_draw_all_tokens_alike():
    logits_V = tf.constant([-3.0, 4.0, 50.0, 9.0], tf.float32)
    config = BeamSearch(1, 64, 0.0, temperature=1e30)
    ids, _, _ = _search(config, lambda *_: tf.tile(logits_V[None, None], [8, 1, 1]), 8, 64)
    counts = np.bincount(ids[:, 0, :-1].ravel(), minlength=4)
    assert counts[EOS] == 0  # Forbidden until the last token.
    expected = ids[:, 0, :-1].size / 3
    assert ((counts[[0, 1, 3]] - expected) ** 2 / expected).sum() < 18.4  # p = 0.0001 at 2 degrees


_TRUNCATED = BeamSearch(1, _STEPS, 0.0, temperature=2.0, top_k=5, top_p=0.8)


_PIECES = 24
_VOCABULARY_TABLES = {
    "as the batch": ("d:*", {"B": "d", "V": "d", "U": ()}),
    "of its own": ("v:*", {"V": "v"}),
    "beside the batch": ("d:2,v:*", {"B": "d", "V": "v"}),
}


def _split_vocabulary(num_partitions, table):
    mesh, rows = _VOCABULARY_TABLES[table]
    return Partitioning.from_dict(Mesh.parse(mesh, num_partitions), rows)


@functools.cache
def _sampler(num_partitions, table="of its own"):
    """Compiles the truncated sampling of a RandomModel, whose vocabulary is split over devices."""
    return _program(_TRUNCATED, _split_vocabulary(num_partitions, table), _PIECES)


def _truncated_softmax(log_probs_V, config):
    """Returns the distribution from which the config draws, by a loop over the sorted tokens."""
    scaled = np.exp(log_probs_V / config.temperature)
    best_first = np.argsort(-scaled)[: config.top_k]
    wanted = np.zeros_like(scaled)
    total = scaled[best_first].sum()
    for token in best_first:
        if wanted.sum() < config.top_p * total:
            wanted[token] = scaled[token]
    return wanted / wanted.sum()


@pytest.mark.slow
def test_truncated_samples_have_the_truncated_distribution():
    """Compares first tokens of many seeds to the exact distribution, by chi-square."""
    draws = 300
    toy = _random_model(5, _PIECES)
    asked = _asked(5, free=True)
    run = _sampler(1)
    counts = np.zeros((_B, _PIECES))
    for seed in range(draws):
        asked.seed = np.array([8, seed], np.int32)
        ids = np.asarray(run(toy.tensors(), asked).ids)
        counts[np.arange(_B), ids[:, 0, 0]] += 1

    num_kept = []
    for b in range(_B):
        expected = draws * _truncated_softmax(_log_probs(toy, b, [])[0], _TRUNCATED)
        kept = expected > 0
        num_kept.append(kept.sum())
        assert not counts[b, ~kept].any()
        distance = (counts[b] - expected)[kept] ** 2 / expected[kept]
        assert distance.sum() < 23.6  # p = 0.0001 at 4 degrees, the most.
    assert max(num_kept) > 2 and min(num_kept) < 5


@pytest.mark.slow
def test_truncated_samples_contain_kept_tokens_only():
    """With its own log-probability, which is not truncated."""
    toy = _random_model(6, _PIECES)
    asked = _asked(6)
    found = _sampler(1)(toy.tensors(), asked).Transform(np.asarray)
    for b in range(_B):
        length = found.lengths[b, 0]
        tokens = found.ids[b, 0, :length].tolist()
        forced = _log_probs(toy, b, tokens[:-1])
        for step, (token, row) in enumerate(zip(tokens, forced, strict=True)):
            assert found.token_log_probs[b, 0, step] == pytest.approx(row[token], abs=1e-4)
            if step + 1 < asked.min_steps[b]:
                row[EOS] = -np.inf
            assert _truncated_softmax(row, _TRUNCATED)[token] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "num_partitions"),
    [
        ("of its own", 2),
        *(
            pytest.param(table, n, marks=marks)
            for table in _VOCABULARY_TABLES
            for n, marks in ((2, exhaustive.RARE), (4, exhaustive.RARE), (8, pytest.mark.slow))
        ),
    ],
)
def test_a_split_vocabulary_gives_the_samples_of_one_device(table, num_partitions):
    given = (_random_model(12, _PIECES).tensors(), _asked(12, free=True))
    wanted = _sampler(1)(*given)
    found = _sampler(num_partitions, table)(*given).Transform(np.asarray)
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-5, atol=1e-5)
    assert len(set(map(tuple, found.ids[:, 0].tolist()))) > _B // 2


@pytest.mark.slow
@pytest.mark.parametrize("table", ["of its own", "beside the batch"])
def test_partitions_of_a_vocabulary_exchange_only_sums_to_truncate(table):
    parts = _split_vocabulary(8, table)
    untruncated = dataclasses.replace(_TRUNCATED, top_k=None, top_p=None)
    before = _program(untruncated, parts, vocab_size=_PIECES).report()
    report = _sampler(8, table).report()
    for kind, count in report.collectives:
        if kind == "all-reduce":
            assert count > before.count(kind)
        else:
            assert count == before.count(kind), kind


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", "h100:1x8"])
def test_truncated_sampling_compiles_for_tpus_and_gpus(name):
    compilers.need(name)
    program = _exported(_TRUNCATED, _split_vocabulary(8, "beside the batch"), vocab_size=_PIECES)
    assert topology_executable.compile_program(program, name).report().count("all-reduce") > 0


@pytest.mark.parametrize("top_k", [8, 1000])
def test_a_top_k_above_the_vocabulary_is_refused(top_k):
    config = BeamSearch(1, 3, temperature=1.0, top_k=top_k)
    message = f"^BeamSearch: top_k must be at most the vocabulary, 7, got {top_k}.$"
    with pytest.raises(ValueError, match=message):
        _search(config, lambda *_: tf.zeros([2, 1, 7]), 2)


def test_a_coverage_penalty_needs_the_models_attention():
    config = BeamSearch(2, 3, coverage_weight=0.1)
    with pytest.raises(ValueError, match="coverage_weight 0.1 needs attention .* has only flat"):
        _search(config, lambda *_: None, 1)
