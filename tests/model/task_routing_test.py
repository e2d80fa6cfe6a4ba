"""Whole models whose encoders route by task: gradients, decoding, and where it is refused.

Random routing is on: its numbers do not depend on the partitioning.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating_layers import TaskTop2Gating
from lingvo_gshard.model import placement
from tests.layers import building
from tests.model import small_task, steps_of_task

_LOOP = ("task.encoder.layers_as=LOOP", "task.encoder.remat=BLOCK", "task.encoder.num_layers=4")
# Sources begin with any piece after the special ones, so each of them stands for a task.
_GATING = TaskTop2Gating.Params().Set(num_tasks=small_task.SOURCE_VOCAB - 3, first_piece=3)


def _params(*settings):
    """A model with experts in the encoder alone, and no dropout."""
    p = small_task.Experiment.params()
    p.task.input_dropout.rate = 0.0
    for stack in (p.task.encoder, p.task.decoder):
        stack.layer.attention.dropout.rate = stack.layer.residual_dropout.rate = 0.0
    p.task.encoder.moe.Set(gating=_GATING.Copy(), group_size=small_task.T)
    p.task.decoder.Set(num_layers=1, moe=None)
    for setting in settings:
        hyperparams.apply_setting(p, setting)
    return p


@functools.cache
def _gradients(num_partitions, *settings):
    """The metrics and gradients of a batch."""
    p = _params(*settings)
    theta = building.random_theta(p.task.Instantiate(building.Unannotated()))
    return steps_of_task.trained(p.task, placement.partitioning(p, num_partitions), theta)


_WAYS = {
    "the paper's": (),
    "experts x data x model": (
        "mesh=data:2,experts:2,model:*",
        "sharding=BG:data+experts,E:experts,HN:model",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_gradients_equal_one_device(way):
    building.assert_close(_gradients(8, *_WAYS[way]), _gradients(1))


@pytest.mark.slow
def test_a_pipeline_routes_as_the_loop_does():
    settings = (*_LOOP, "task.encoder.moe.gating.second_expert=ALL")
    stages = ("task.encoder.stages=2", "task.encoder.microbatches=2")
    building.assert_close(_gradients(1, *settings, *stages), _gradients(1, *settings))


@pytest.mark.slow
def test_decoding_step_by_step_equals_teacher_forcing():
    task = _params().task.Instantiate(building.Unannotated())
    steps_of_task.check_decoding(task, building.random_theta(task))


def test_the_first_piece_of_a_sentence_is_its_tokens_task():
    """Each sentence of a packed row has its own."""
    task = _params().task.Instantiate(building.Unannotated())
    features = small_task.random_batch(3).features
    noted = []
    encode = task.encoder.FProp

    def fprop(theta, x, attended, context):
        noted.append(attended.first_pieces.numpy())
        return encode(theta, x, attended, context)

    task.encoder.FProp = fprop
    theta = building.random_theta(task).Transform(tf.constant)
    task.FProp(theta, features.Transform(tf.constant), Context(Mode.EVAL))

    (pieces_BT,) = noted
    want_BT = np.zeros_like(features.source_ids)
    for b, segments_T in enumerate(features.source_segment_ids):
        for i, segment in enumerate(segments_T):
            if segment:
                first = list(segments_T).index(segment)
                want_BT[b, i] = features.source_ids[b, first]
    np.testing.assert_array_equal(pieces_BT, want_BT)
    assert len(set(want_BT.ravel())) > 3


def test_a_decoder_refuses_it():
    p = small_task.task_params()
    p.decoder.moe.gating = _GATING.Copy()
    task = p.Instantiate(building.Unannotated())
    theta = building.random_theta(task).Transform(tf.constant)
    batch = small_task.random_batch(3).Transform(tf.constant)
    refused = r"decoder\.\S+\.gate: TaskTop2Gating needs the token that begins a source, which only"
    with pytest.raises(ValueError, match=refused):
        task.Loss(theta, batch.features, batch.labels, Context(Mode.EVAL))
