"""The beam over the whole model: its scores equal teacher forcing's, token by token.

B batch, k beam, n hypotheses, T steps, S source length.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import BeamSearch, Requests
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating import CapacityBy
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests import exhaustive
from tests.layers import building
from tests.model import small_task
from tests.model.small_task import B, L
from tests.spmd import functions

_EOS = 2
_CONFIG = BeamSearch(3, L, 1.0, num_best=2, coverage_weight=0.1, min_stage_places=9)


def _search(task, annotate):
    def fn(theta, features):
        def step(state, *args):
            return task.DecodeStep(theta, state, *args)

        state = task.InitDecode(theta, features, _CONFIG.first_places, attention_beam=3)
        has_source = tf.reduce_max(features.source_segment_ids, 1)
        requests = Requests(tf.fill([B], 2), L * has_source, tf.constant([0, 0]))
        found = flat_beam_search.search(_CONFIG, step, state, requests, annotate, task.GrowDecode)
        return NestedMap(vars(found))

    return fn


def _task(annotator, layers_as=Layers.UNROLLED):
    params = small_task.task_params()
    if layers_as is Layers.LOOP:
        for stack in (params.encoder, params.decoder):
            stack.Set(layers_as=layers_as, num_layers=4)
    return params.Instantiate(annotator)


def _theta(layers_as):
    weights = building.random_theta(_task(building.Unannotated(), layers_as))
    weights.softmax[:, _EOS] *= 4  # Sometimes EOS is the likeliest, so lengths differ.
    return weights


def _found(theta, num_partitions, layers_as, features):
    parts = functions.partitioning(num_partitions)
    task = _task(Annotator(parts), layers_as)
    specs = features.Transform(lambda x: TensorSpec(x.shape, "int32", "BL"))

    dims = {"ids": "B__", "lengths": "B_", "scores": "B_", "token_log_probs": "B__"}
    run = building.compile_fn(
        _search(task, Annotator(parts).annotate),
        num_partitions,
        {**dims, "attention": "B___"},
        theta=building.theta_specs(task),
        features=specs,
    )
    return run(theta, features).Transform(np.asarray)


def _forced(theta, layers_as, features, ids_BT, lengths_B):
    """Log-probabilities [B, T] of each token given the earlier ones, with teacher forcing."""
    inputs = np.concatenate([np.ones((B, 1), np.int32), ids_BT[:, :-1]], 1)
    features = NestedMap(
        features,
        target_ids=inputs,
        target_segment_ids=(np.arange(L) < lengths_B[:, None]).astype(np.int32),
        target_positions=np.tile(np.arange(L, dtype=np.int32), (B, 1)),
    )

    task = _task(building.Unannotated(), layers_as)
    logits, _ = task.FProp(
        theta.Transform(tf.constant), features.Transform(tf.constant), Context(Mode.EVAL)
    )
    log_probs = tf.nn.log_softmax(logits).numpy()
    return np.take_along_axis(log_probs, ids_BT[..., None], -1)[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(1, 2, 4), 8])
@pytest.mark.parametrize("layers_as", [*exhaustive.only(Layers.UNROLLED), Layers.LOOP])
def test_scores_equal_teacher_forcing(num_partitions, layers_as):
    theta = _theta(layers_as)
    features = small_task.source_batch(3, pad_last=True)
    found = _found(theta, num_partitions, layers_as, features)

    # Of different lengths, so that some end before others.
    assert (found.lengths[:-1] >= 2).all() and len(set(found.lengths[:-1].flat)) > 1
    for i in range(2):
        lengths = found.lengths[:, i]
        valid = np.arange(L) < lengths[:, None]
        want = _forced(theta, layers_as, features, found.ids[:, i], lengths) * valid
        np.testing.assert_allclose(found.token_log_probs[:, i], want, rtol=1e-4, atol=1e-4)
        assert all(found.ids[b, i, lengths[b] - 1] == _EOS for b in range(B - 1))

        attention = found.attention[:, i]
        np.testing.assert_allclose(attention.sum(-1), valid.astype(float), atol=1e-5)
        assert not (attention * (features.source_segment_ids[:, None] == 0)).any()

        covered = np.minimum(attention.sum(1), 1.0)
        covered = np.where(features.source_segment_ids > 0, covered, 1.0)
        score = want.sum(-1) / ((5 + lengths) / 6) + 0.1 * np.log(covered).sum(-1)
        np.testing.assert_allclose(found.scores[:-1, i], score[:-1], rtol=1e-4, atol=1e-4)
    assert not found.lengths[-1].any() and not found.ids[-1].any()  # No source, no hypothesis.


def test_absent_hypothesis_takes_no_expert():
    """If three tokens choose the same expert, a capacity of one token admits only the first."""
    params = small_task.task_params()
    params.decoder.moe.eval_capacity.Set(by=CapacityBy.FACTOR, factor=0.1)
    task = params.Instantiate(building.Unannotated())
    weights = _theta(Layers.UNROLLED).Transform(tf.constant)
    features = small_task.source_batch(5, pad_last=True).Transform(tf.constant)

    ids = tf.fill([B, 3], 7)
    first = tf.reshape(tf.eye(3), [1, 3, 3])

    def logits(*present):
        state = task.InitDecode(weights, features, 3)
        mask = tf.tile(first, [B, 1, 1]) * tf.constant(present, tf.float32)[None, :, None]
        return task.DecodeStep(weights, state, ids, mask, tf.constant(0))[0].numpy()[:-1]

    all_three = logits(1, 1, 1)
    last_two = logits(0, 1, 1)
    last = logits(0, 0, 1)

    np.testing.assert_allclose(last_two[:, 1], all_three[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last[:, 2], all_three[:, 0], rtol=1e-5, atol=1e-5)
    assert np.abs(all_three[:, 1] - all_three[:, 0]).max() > 1e-2  # The second one found no room.
