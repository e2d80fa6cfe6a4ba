"""The flat beam finds the same hypotheses as caches that are reordered at every step."""

import numpy as np
import pytest
import tensorflow as tf

from bench import classic_beam
from lingvo_gshard.beam_search import flat_beam_search
from lingvo_gshard.beam_search.beam import BeamSearch, Requests
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building
from tests.model import small_task
from tests.model.small_task import B
from tests.spmd import functions

pytestmark = pytest.mark.slow

_CONFIG = BeamSearch(4, 9, 0.0, min_stage_places=12)


def _found(theta, features, is_flat):
    parts = functions.partitioning(2)
    task = small_task.task_params().Instantiate(Annotator(parts))

    # A search with a state, a step and a way to grow of either kind.
    def fn(theta, features):
        if is_flat:
            grow = task.GrowDecode
            state = task.InitDecode(theta, features, _CONFIG.first_places)

            def step(state, *args):
                return task.DecodeStep(theta, state, *args)

        else:
            grow = classic_beam.grow(task, _CONFIG)
            state = classic_beam.init_state(task, theta, features, _CONFIG)
            step = classic_beam.decode_step(task, theta, _CONFIG)

        shortest = tf.fill([B], 1)
        longest = tf.fill([B], _CONFIG.max_steps)
        requests = Requests(shortest, longest, tf.constant([0, 0]))
        found = flat_beam_search.search(
            _CONFIG, step, state, requests, Annotator(parts).annotate, grow
        )
        return NestedMap(vars(found), attention=tf.zeros([]))

    dims = {"ids": "B__", "lengths": "B_", "scores": "B_", "token_log_probs": "B__"}
    specs = features.Transform(lambda x: TensorSpec(x.shape, "int32", "BL"))
    run = building.compile_fn(fn, 2, dims, theta=building.theta_specs(task), features=specs)
    return run(theta, features).Transform(np.asarray)


def test_flat_beam_equals_reordered_caches():
    theta = building.random_theta(small_task.task_params().Instantiate(building.Unannotated()))
    theta.softmax[:, 2] *= 4  # Sometimes EOS is the likeliest, so lengths differ.
    features = small_task.source_batch(2)

    flat = _found(theta, features, is_flat=True)
    classic = _found(theta, features, is_flat=False)
    assert len(set(flat.lengths.flat)) > 2
    np.testing.assert_array_equal(flat.ids, classic.ids)
    np.testing.assert_allclose(flat.scores, classic.scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.token_log_probs, classic.token_log_probs, rtol=1e-3, atol=1e-4)
