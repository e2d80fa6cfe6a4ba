"""Whole models with DeepSeek-V3's router and dropless training, in every way a stack is applied."""

import functools

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating_layers import Scores, TopKGating
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.optim.adamw import AdamW
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building, stacking
from tests.model import small_task
from tests.spmd import functions
from tests.xla_spmd import compilers

_RATE = 0.01
_PLAIN = (Layers.UNROLLED, Remat.NONE)


def _params(layers_as, remat, dispatch, accumulation=1, **settings):
    """Two of eight experts by sigmoids with biases, one shared expert, z-loss; nothing is random.

    Group sizes divide the microbatches of a pipeline, and buffers have room for all tokens.
    """
    p = small_task.Experiment.params()
    p.optimizer = AdamW.Params().Set(max_gradient_norm=0.01)
    p.train.gradient_accumulation_steps = accumulation
    p.task.input_dropout.rate = 0.0
    for stack, length in ((p.task.encoder, small_task.T), (p.task.decoder, small_task.L)):
        stack.Set(layers_as=layers_as, remat=remat, num_layers=4, **settings)
        stack.layer.attention.dropout.rate = stack.layer.residual_dropout.rate = 0.0
        stack.moe.Set(group_size=length, dispatch=dispatch, num_shared=1)
        stack.moe.train_capacity.factor = 8.0
        stack.moe.gating = TopKGating.Params().Set(
            k=2, scores=Scores.SIGMOID, bias_rate=_RATE, z_loss_weight=0.01
        )
    return p


def _model(num_partitions, *way, **settings):
    params = _params(*way, **settings)
    return params, TaskModel(params, functions.partitioning(num_partitions))


@functools.cache
def _start():
    """The first state, in the layout of unrolled layers, with biases that are not all alike."""
    _, model = _model(1, *_PLAIN, Dispatch.EINSUM)
    return small_task.start_state(model)


@functools.cache
def _stepped(num_partitions, *way, **settings):
    """The state and the metrics after a step."""
    _, model = _model(num_partitions, *way, **settings)
    executable = building.compile_fn(
        model.train,
        num_partitions,
        building.dims_of(state=model.state_spec),
        state=model.state_spec,
        batch=small_task.batch_specs(),
    )
    state = _start()
    if way[0] is Layers.LOOP:
        state = stacking.stacked(state, 2)
    result = executable(state, small_task.random_batch(3)).Transform(np.asarray)
    return NestedMap(result, state=stacking.unstacked(result.state))


def _biases(theta):
    return {path: bias for path, bias in theta.FlattenItems() if path.endswith("gate.bias")}


_WAYS = [
    (8, Layers.UNROLLED, Remat.NONE, Dispatch.RAGGED),
    (2, Layers.LOOP, Remat.BLOCK, Dispatch.GATHER),
    *exhaustive.only(
        (1, Layers.UNROLLED, Remat.ALL_BUT_PRODUCTS, Dispatch.RAGGED),
        (2, Layers.LOOP, Remat.NONE, Dispatch.RAGGED),
        (2, Layers.LOOP, Remat.BLOCK, Dispatch.RAGGED),
        (4, Layers.LOOP, Remat.ALL_BUT_PRODUCTS, Dispatch.RAGGED),
        (4, Layers.UNROLLED, Remat.BLOCK, Dispatch.EINSUM),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
def test_every_way_equals_buffers_with_room_for_all(way):
    got = _stepped(*way)
    want = _stepped(1, *_PLAIN, Dispatch.EINSUM)
    building.assert_close(got, want, rtol=1e-3)
    for path, bias_E in _biases(got.state.theta).items():
        np.testing.assert_allclose(bias_E, _biases(want.state.theta)[path], atol=1e-7)


_PARTS = {
    "pipeline": ((Layers.LOOP, Remat.BLOCK), {"stages": 2, "microbatches": 2}),
    "accumulation": (_PLAIN, {"accumulation": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline", *exhaustive.only("accumulation")])
def test_parts_of_a_batch_move_biases_by_the_sum_of_their_loads(name):
    way, settings = _PARTS[name]
    got = _stepped(1, *way, Dispatch.EINSUM, **settings)
    want = _stepped(1, *_PLAIN, Dispatch.EINSUM)
    for path, bias_E in _biases(got.state.theta).items():
        np.testing.assert_allclose(bias_E, _biases(want.state.theta)[path], atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dispatch"),
    [
        ("v3:2x2", Dispatch.RAGGED),
        ("v3:2x2", Dispatch.EINSUM),
        pytest.param("h100:1x8", Dispatch.RAGGED, marks=pytest.mark.exhaustive),
    ],
)
def test_the_router_compiles_for_tpus_and_gpus(name, dispatch):
    compilers.need(name)
    params = _params(Layers.LOOP, Remat.BLOCK, dispatch)
    programs = Programs(TaskModel(params, functions.partitioning(8)), in_process=True)
    program = programs.exported(Mode.TRAIN, small_task.batch_specs())
    assert topology_executable.compile_program(program, name).report().count("all-reduce") > 0
