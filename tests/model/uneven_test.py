"""Whole models with sizes that the devices do not divide: the numbers equal one device's.

13 rows and 13 groups; M = 18, H = 30, 6 heads, 6 experts, vocabularies of 25 and 31.
"""

import functools

import numpy as np
import pytest

from lingvo_gshard.core import hyperparams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.model import placement
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.spmd.padded import PaddedArray
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building
from tests.model import small_task
from tests.spmd import functions
from tests.xla_spmd import compilers

_ROWS = 13
_STEPS = 3
_WAYS = {
    "the paper's": (),
    "Megatron": ("sharding=HN:d",),
    "ZeRO-2": ("sharding=BGE:d,mhnv:d",),
    "ZeRO-3": ("sharding=BGEMHNV:d",),
    "one weird trick": ("sharding=BGEV:d,U:-",),
    "experts x model": ("mesh=experts:4,model:*", "sharding=BGE:experts,HNV:model"),
    "other devices": ("mesh=a:2,b:*", "sharding=BG:a,HN:b", "device_assignment=[7,6,5,4,0,1,2,3]"),
}
_LEFT_TO_EXHAUSTIVE = ("Megatron", "ZeRO-2", "ZeRO-3", "one weird trick", "other devices")


class _Experiment(small_task.Experiment):
    """Sizes that 8 devices do not divide."""

    MODEL_DIM = 18
    HIDDEN_DIM = 30
    NUM_HEADS = 6
    HEAD_DIM = 3
    NUM_EXPERTS = 6
    GROUP_SIZE = 6
    DROPOUT = 0.1
    SOURCE_VOCAB_SIZE = 25
    TARGET_VOCAB_SIZE = 31
    BATCH_SIZE = _ROWS


def _params(*settings):
    params = _Experiment.params()
    params.task.decoder.Set(num_layers=1, **{"moe.group_size": 7})
    params.decode.batch_size = _ROWS
    params.eval_input.batch_size = _ROWS
    for setting in settings:
        hyperparams.apply_setting(params, setting)
    return params


def _batch(seed):
    """13 rows of two random batches."""
    first = small_task.random_batch(seed)
    second = small_task.random_batch(seed + 100)
    return first.Transform(lambda x, y: np.concatenate([x, y])[:_ROWS], second)


def _specs(batch):
    return batch.Transform(lambda x: functions.TensorSpec(x.shape, x.dtype.name, "BL"))


@functools.cache
def _computed(num_partitions, *settings):
    """Returns the losses and state of three steps, the metrics of evaluation, and tokens."""
    params = _params(*settings)
    parts = placement.partitioning(params, num_partitions)
    placement.check_sizes(params, parts)
    model = TaskModel(params, parts)
    programs = Programs(model, in_process=True)
    state = small_task.start_state(model)
    theta = state.theta

    evaluate = programs.get(Mode.EVAL, _specs(_batch(0)))
    metrics = evaluate(state, _batch(1)).Transform(np.asarray)

    rows = small_task.source_batch(2)
    features = rows.Transform(lambda x: np.concatenate([x, x[::-1]])[:_ROWS])
    decode = compile_program(programs.decoder(small_task.T))
    found = decode(NestedMap(theta=theta), NestedMap(features=features))

    train = programs.get(Mode.TRAIN, _specs(_batch(0)))
    losses = []
    for seed in range(_STEPS):
        result = train(state, _batch(seed).Transform(lambda x: x[None]))
        state = result.state
        losses.append(float(np.asarray(result.metrics.loss)[0]))

    is_padded = any(isinstance(leaf, PaddedArray) for leaf in state.Flatten())
    ids = np.asarray(found.predictions.ids)
    return losses, state.Transform(np.asarray), metrics, ids, is_padded


def _check(computed, wanted):
    np.testing.assert_allclose(computed[0], wanted[0], rtol=1e-5)
    building.assert_close(computed[1], wanted[1], rtol=1e-3)
    building.assert_close(computed[2], wanted[2], rtol=1e-4)
    np.testing.assert_array_equal(computed[3], wanted[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        *exhaustive.only(*_LEFT_TO_EXHAUSTIVE),
        *(way for way in _WAYS if way not in _LEFT_TO_EXHAUSTIVE),
    ],
)
def test_a_model_of_uneven_sizes_equals_one_device(way):
    computed = _computed(8, *_WAYS[way])
    _check(computed, _computed(1))

    # Weights are padded if the table splits one of their dims: neither 8 nor 4 divides them.
    table = _params(*_WAYS[way]).sharding
    assert computed[-1] == any(letter in table for letter in "EHNVhnv")


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["GATHER", "RAGGED"])
@pytest.mark.parametrize(
    ("num_partitions", "mesh"),
    [
        pytest.param(4, "d:*", marks=pytest.mark.exhaustive),
        (8, "x:2,y:*"),
        pytest.param(2, "d:*", marks=pytest.mark.exhaustive),
        pytest.param(8, "d:*", marks=pytest.mark.exhaustive),
    ],
)
def test_every_dispatch_takes_uneven_groups_and_experts(dispatch, num_partitions, mesh):
    """6 experts on 4 devices, and 13 rows on 2 x 4."""
    axes = "+".join(axis.split(":")[0] for axis in mesh.split(","))
    settings = [f"mesh={mesh}", f"sharding=BG:{axes},E:{axes[-1]}"]
    ways = [f"task.{stack}.moe.dispatch={dispatch}" for stack in ("encoder", "decoder")]
    _check(_computed(num_partitions, *settings, *ways), _computed(1, *ways))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
@pytest.mark.parametrize("way", ["the paper's", *exhaustive.only("ZeRO-3")])
def test_uneven_sizes_compile_for_tpus_and_gpus(name, way):
    compilers.need(name)
    params = _params(*_WAYS[way])
    parts = placement.partitioning(params, 8)
    program = Programs(TaskModel(params, parts), in_process=True).exported(
        Mode.TRAIN, _specs(_batch(0))
    )
    assert topology_executable.compile_program(program, name).report().count("all-reduce") > 0
