"""Whole models whose encoders route by sentence: training, decoding, and where it is refused.

Random routing is on: its numbers do not depend on the partitioning.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating_layers import SentenceTop2Gating, Top2Gating
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building
from tests.model import small_language_model, small_task, steps_of_task
from tests.xla_spmd import compilers

_LOOP = ("task.encoder.layers_as=LOOP", "task.encoder.remat=BLOCK", "task.encoder.num_layers=4")
_STEPS = 3
_REFUSED = (
    r"decoder\.\S+\.gate: SentenceTop2Gating needs whole sentences, which only an encoder has; "
    r"expected Top2Gating or TopKGating in a decoder\.$"
)


def _params(*settings, gating=SentenceTop2Gating):
    """A model with experts in the encoder alone, and no dropout."""
    p = small_task.Experiment.params()
    p.task.input_dropout.rate = 0.0
    for stack in (p.task.encoder, p.task.decoder):
        stack.layer.attention.dropout.rate = stack.layer.residual_dropout.rate = 0.0
    p.task.encoder.moe.Set(gating=gating.Params(), group_size=small_task.T)
    p.task.decoder.Set(num_layers=1, moe=None)
    p.decode.batch_size = small_task.B
    for setting in settings:
        hyperparams.apply_setting(p, setting)
    return p


@functools.cache
def _trained(num_partitions, *settings, gating=SentenceTop2Gating, steps=_STEPS):
    """Steps on one batch, which the model learns by heart."""
    batches = [small_task.random_batch(3)] * steps
    return steps_of_task.training(_params(*settings, gating=gating), num_partitions, batches)


@functools.cache
def _decoded(num_partitions, *settings):
    """The ids and scores that flat beam search finds with the weights after training."""
    params = _params(*settings)
    model = TaskModel(params, placement.partitioning(params, num_partitions))
    decode = compile_program(Programs(model, in_process=True).decoder(small_task.T))
    theta = _trained(1).state.theta
    found = decode(NestedMap(theta=theta), NestedMap(features=small_task.source_batch(2, True)))
    return found.predictions.Transform(np.asarray)


_WAYS = {
    "the paper's": (),
    "experts x data x model": (
        "mesh=data:2,experts:2,model:*",
        "sharding=BG:data+experts,E:experts,HN:model",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_training_and_decoding_equal_one_device(way):
    steps_of_task.assert_same_training(_trained(8, *_WAYS[way]), _trained(1))
    building.assert_close(_decoded(8, *_WAYS[way]), _decoded(1), rtol=1e-4)


@pytest.mark.slow
def test_training_learns_and_routes_unlike_tokens():
    nll = [metrics.nll.item() for metrics in _trained(1, steps=12).metrics]
    assert nll[-1] < nll[0] - 0.1
    by_token = _trained(1, gating=Top2Gating)
    assert by_token.metrics[0].nll.item() != nll[0]


@pytest.mark.slow
def test_a_pipeline_routes_as_the_loop_does():
    settings = (*_LOOP, "task.encoder.moe.gating.second_expert=ALL")
    stages = ("task.encoder.stages=2", "task.encoder.microbatches=2")
    steps_of_task.assert_same_training(_trained(1, *settings, *stages), _trained(1, *settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x4", *exhaustive.only("h100:1x8")])
@pytest.mark.parametrize("is_decoder", [False, True], ids=["training", "decoding"])
def test_programs_compile_for_tpus_and_gpus(name, is_decoder):
    compilers.need(name)
    params = _params(*_LOOP)
    model = TaskModel(params, placement.partitioning(params, 8))
    programs = Programs(model, in_process=True)
    if is_decoder:
        program = programs.decoder(small_task.T)
    else:
        program = programs.exported(Mode.TRAIN, small_task.batch_specs())
    report = topology_executable.compile_program(program, name).report()
    assert report.count("all-to-all") > 0


@pytest.mark.slow
def test_decoding_step_by_step_equals_teacher_forcing():
    task = _params().task.Instantiate(building.Unannotated())
    steps_of_task.check_decoding(task, building.random_theta(task))


def _decoder_task():
    """The task whose decoder has the setting, too."""
    p = small_task.task_params()
    p.decoder.moe.gating = SentenceTop2Gating.Params()
    return p.Instantiate(building.Unannotated())


def _loss(task, batch):
    theta = building.random_theta(task).Transform(tf.constant)
    batch = batch.Transform(tf.constant)
    task.Loss(theta, batch.features, batch.labels, Context(Mode.EVAL))


def test_a_decoder_refuses_it():
    with pytest.raises(ValueError, match=_REFUSED):
        _loss(_decoder_task(), small_task.random_batch(3))


def test_decoding_prompts_refuses_it_in_a_language_model():
    p = small_language_model.task_params()
    p.decoder.moe.gating = SentenceTop2Gating.Params()
    task = p.Instantiate(building.Unannotated())
    theta = building.random_theta(task).Transform(tf.constant)
    with pytest.raises(ValueError, match=_REFUSED):
        task.InitDecode(theta, small_language_model.prompts(3).Transform(tf.constant), 2)
