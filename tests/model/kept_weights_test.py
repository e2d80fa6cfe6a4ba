"""Decoding with weights as decoders keep them: on any number of devices, by any machine."""

import functools

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stored_weights import Numbers
from lingvo_gshard.model import placement
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building
from tests.model import small_task
from tests.model.small_task import B, L, T
from tests.xla_spmd import compilers

_EOS = 2


def _params(numbers, layers_as=Layers.UNROLLED, shared=False):
    p = small_task.Experiment.params()
    for stack in (p.task.encoder, p.task.decoder):
        stack.layers_as = layers_as
        if layers_as is Layers.LOOP:
            stack.num_layers = 4  # Two blocks.
    if shared:
        p.task.Set(shared_embeddings=True, source_vocab_size=small_task.TARGET_VOCAB)
    p.decode.Set(weights=numbers, batch_size=B, beam_size=3, max_target_len=L)
    return p


@functools.cache
def _theta(layers_as=Layers.UNROLLED, shared=False):
    params = _params(Numbers.FLOAT32, layers_as, shared)
    theta = building.random_theta(TaskModel(params, placement.partitioning(params, 1)).task)
    if not shared:
        theta.softmax[:, _EOS] *= 3  # Sometimes EOS is the likeliest, so lengths differ.
    return theta


def _found(num_partitions, numbers, **settings):
    """The hypotheses that a decoder finds with the weights that it keeps."""
    params = _params(numbers, **settings)
    parts = placement.partitioning(params, num_partitions)
    programs = Programs(TaskModel(params, parts), in_process=True)
    keep = compile_program(programs.weight_converter())
    decode = compile_program(programs.decoder(T))

    kept = keep(NestedMap(theta=_theta(**settings))).state
    features = small_task.source_batch(3, pad_last=True)
    return decode(kept, NestedMap(features=features)).predictions.Transform(np.asarray)


def _check_same(found, wanted):
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-4, atol=1e-4)


def _error(found, exact):
    """The median, since a token of so small a model may well choose another expert."""
    return np.median(np.abs(found.scores[:-1] - exact.scores[:-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "bound"),
    [
        pytest.param(Numbers.FLOAT32_LAID_OUT, 1e-4, marks=pytest.mark.exhaustive),
        pytest.param(Numbers.BFLOAT16, 0.02, marks=pytest.mark.exhaustive),
        (Numbers.INT8, 0.05),
    ],
)
def test_partitioned_equals_unpartitioned(numbers, bound):
    wanted = _found(1, numbers)
    assert len(set(wanted.lengths[:-1].flat)) > 1
    for num_partitions in (2, 4, 8):
        _check_same(_found(num_partitions, numbers), wanted)

    error = _error(wanted, _found(1, Numbers.FLOAT32))
    assert error < bound
    # The same numbers, perhaps summed in another order.
    assert error > 0 or numbers is Numbers.FLOAT32_LAID_OUT


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{"layers_as": Layers.LOOP}, {"shared": True}])
def test_stacks_as_loops_and_shared_tables(settings):
    wanted = _found(1, Numbers.INT8, **settings)
    _check_same(_found(2, Numbers.INT8, **settings), wanted)
    assert 0 < _error(wanted, _found(1, Numbers.FLOAT32, **settings)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
@pytest.mark.parametrize("numbers", [*exhaustive.only(Numbers.BFLOAT16), Numbers.INT8])
@pytest.mark.parametrize("layers_as", [*exhaustive.only(Layers.UNROLLED), Layers.LOOP])
def test_decoders_compile_for_tpus_and_gpus(name, numbers, layers_as):
    compilers.need(name)
    params = _params(numbers, layers_as)
    program = Programs(
        TaskModel(params, placement.partitioning(params, 8)), in_process=True
    ).decoder(T)
    assert topology_executable.compile_program(program, name).report().count("all-to-all") > 0
