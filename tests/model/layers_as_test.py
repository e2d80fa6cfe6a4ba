"""Training steps with layers in a loop or rematerialized equal steps with unrolled layers.

A way is a pair of Layers and Remat. Steps that are not finite are tested here, too.
"""

import collections
import functools
import re

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.model.spec import Mode
from lingvo_gshard.model.task_model import TaskModel
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.train.programs import Programs
from tests import exhaustive
from tests.layers import building, stacking
from tests.model import small_task
from tests.spmd import functions
from tests.xla_spmd import compilers
from xla_plan.cost.scopes import is_recomputed

_PLAIN = (Layers.UNROLLED, Remat.NONE)
_LOOP = (Layers.LOOP, Remat.BLOCK)
_KEEPING = (Layers.LOOP, Remat.ALL_BUT_PRODUCTS)
_KEEPING_MORE = (Layers.LOOP, Remat.ALL_BUT_PROJECTIONS)
_OTHERS = [
    (Layers.UNROLLED, Remat.BLOCK),
    (Layers.UNROLLED, Remat.ALL_BUT_PRODUCTS),
    (Layers.LOOP, Remat.NONE),
    _KEEPING,
]


def _params(
    layers_as,
    remat,
    activation_dtype="float32",
    dispatch=Dispatch.EINSUM,
    num_layers=(2, 4),
    kept_hidden_dtype=None,
):
    p = small_task.Experiment.params()
    p.task.activation_dtype = activation_dtype
    stacks = (p.task.encoder, p.task.decoder)
    for stack, count, group_size in zip(stacks, num_layers, (12, 14), strict=True):
        stack.Set(layers_as=layers_as, remat=remat, num_layers=count)
        stack.kept_hidden_dtype = kept_hidden_dtype
        stack.moe.Set(group_size=group_size, dispatch=dispatch)
    return p


def _start(**changes):
    """A state from the middle of training, in the UNROLLED layout."""
    model = TaskModel(_params(*_PLAIN, **changes), functions.partitioning(1))
    rng = np.random.default_rng(2)
    return NestedMap(
        step=np.int32(3),
        theta=building.random_theta(model.task),
        slots=model.state_spec.slots.Transform(
            lambda s: (1e-4 * rng.uniform(0.1, 1.0, s.shape)).astype("float32")
        ),
    )


class _Step:
    """The compiled training step of one way, for states in the UNROLLED layout."""

    def __init__(self, way, num_partitions, **changes):
        params = _params(*way, **changes)
        model = TaskModel(params, functions.partitioning(num_partitions))
        self._layers_as = way[0]
        self.executable = building.compile_fn(
            model.train,
            num_partitions,
            building.dims_of(state=model.state_spec),
            state=model.state_spec,
            batch=small_task.batch_specs(),
        )

    def __call__(self, state):
        """NestedMap(state, metrics)."""
        if self._layers_as is Layers.LOOP:
            state = stacking.stacked(state, 2)
        result = self.executable(state, small_task.random_batch(3)).Transform(np.asarray)
        return NestedMap(result, state=stacking.unstacked(result.state))


def _computed_again(executable):
    """Counts the operations of the pass that computes results again, by name."""
    text = executable.compiled.as_text()
    names = filter(is_recomputed, re.findall(r'op_name="([^"]*)"', text))
    return collections.Counter(name.rpartition("/")[2] for name in names)


@pytest.fixture(scope="module")
def step_of():
    """(way, partitions, **changes) -> _Step, compiled once."""
    return functools.cache(_Step)


@pytest.mark.slow
def test_rematerialized_loop_equals_unrolled(step_of):
    """Compares loss, gradient norms, routing, weights and slots; random draws are equal, too."""
    got = step_of(_LOOP, 1)(_start())
    want = step_of(_PLAIN, 1)(_start())
    building.assert_close(got, want, atol=1e-6)

    before = _start().theta
    for (path, a), b in zip(got.state.theta.FlattenItems(), before.Flatten(), strict=True):
        assert (a != b).any(), path

    layers = {"encoder_0", "encoder_1", "decoder_0", "decoder_1", "decoder_2", "decoder_3"}
    assert got.metrics.activation_norms.keys() == layers
    assert got.metrics.gradient_norms.keys() > layers
    assert set(got.metrics.routing.overflow) == {name for name in layers if name[-1] in "13"}
    assert got.metrics.skipped == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("way", [*exhaustive.only(*_OTHERS[:-1]), _OTHERS[-1]])
def test_every_way_equals_unrolled(step_of, way):
    building.assert_close(step_of(way, 2)(_start()), step_of(_PLAIN, 1)(_start()), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
def test_partitioned_loop_equals_unrolled(step_of, num_partitions):
    got = step_of(_LOOP, num_partitions)(_start())
    want = step_of(_PLAIN, 1)(_start())
    building.assert_close(got, want, rtol=1e-3)


@pytest.mark.slow
def test_partitioned_loop_exchanges_only_tokens(step_of):
    """An MoE layer has 2 all-to-alls forward, 2 backward and 2 recomputed; weights stay."""
    report = step_of(_LOOP, 2).executable.report()
    kinds = collections.Counter(op.kind for op in report.collective_ops)
    assert kinds.keys() == {"all-to-all", "all-reduce"}
    assert (
        kinds["all-to-all"] == 2 * 6
    )  # The encoder's loops hold one MoE layer, the decoder's one.


@pytest.mark.slow
def test_kept_products_are_not_exchanged_again(step_of):
    report = step_of(_KEEPING, 2).executable.report()
    assert report.count("all-to-all") == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", exhaustive.only(1, 2, 4, 8))
def test_projections_and_choices_that_are_kept_equal_unrolled(step_of, num_partitions):
    """Kept results are not recomputed: experts are chosen, and places counted, only once."""
    keeping = _Step(_KEEPING_MORE, num_partitions)
    building.assert_close(keeping(_start()), step_of(_PLAIN, 1)(_start()), rtol=1e-3)

    again = _computed_again(keeping.executable)
    without = _computed_again(step_of(_KEEPING, num_partitions).executable)
    assert without["ArgMax"] > 0 and without["Cumsum"] > 0
    assert again["ArgMax"] == again["Cumsum"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_keeping_more_results_compiles_for_tpus_and_gpus(name):
    compilers.need(name)
    params = _params(*_KEEPING_MORE, kept_hidden_dtype="bfloat16")
    programs = Programs(TaskModel(params, functions.partitioning(8)), in_process=True)
    program = programs.exported(Mode.TRAIN, small_task.batch_specs())
    executable = topology_executable.compile_program(program, name)
    assert executable.report().count("all-to-all") > 0

    # The second pass computes no choice of experts.
    again = _computed_again(executable)
    assert again["Softmax"] > 0
    assert again["ArgMax"] == again["Cumsum"] == 0


@pytest.mark.slow
def test_gather_dispatch_equals_einsum_dispatch(step_of):
    gather = _Step(_KEEPING, 2, dispatch=Dispatch.GATHER)
    building.assert_close(gather(_start()), step_of(_PLAIN, 1)(_start()), rtol=1e-3)
    moves = [op for op in gather.executable.report().collective_ops if "feed_" in op.op_name]
    assert {op.kind for op in moves} == {"all-to-all", "all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "loss_is_finite"),
    [(np.inf, False), (1e25, True)],  # The loss is finite, but gradients overflow float32.
)
@pytest.mark.parametrize("way", [_PLAIN, _LOOP])
def test_non_finite_step_changes_only_the_step_count(step_of, way, scale, loss_is_finite):
    state = _start()
    state.theta.softmax = (state.theta.softmax * scale).astype("float32")
    got = step_of(way, 1)(state)
    assert got.metrics.skipped == 1.0 and np.isfinite(got.metrics.loss) == loss_is_finite
    assert not np.isfinite(got.metrics.gradient_norms.encoder_0)
    assert got.state.step == state.step + 1
    for part in ("theta", "slots"):
        for (path, a), b in zip(got.state[part].FlattenItems(), state[part].Flatten(), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=path)
