"""Layers as a loop and recomputed blocks: the step of layers one after the other, to the end.

And what a step does, in each of these ways, whose loss or gradients are not finite.
"""

import collections
import functools

import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import stacking
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.model.translation_model import TranslationModel
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.executable import compile_program
from lingvo_gshard.train import steps
from params.experiment import TranslationExperiment
from tests.layers import building
from tests.model import small_task
from tests.spmd import functions

_PLAIN = (Layers.UNROLLED, Remat.NONE)
_LOOP = (Layers.LOOP, Remat.BLOCK)
_KEEPING = (Layers.LOOP, Remat.ALL_BUT_PRODUCTS)
_OTHERS = [
    (Layers.UNROLLED, Remat.BLOCK),
    (Layers.UNROLLED, Remat.ALL_BUT_PRODUCTS),
    (Layers.LOOP, Remat.NONE),
    _KEEPING,
]


class _Experiment(TranslationExperiment):
    NUM_LAYERS, MODEL_DIM, HIDDEN_DIM, NUM_HEADS, HEAD_DIM = 6, 8, 10, 2, 3
    NUM_EXPERTS, GROUP_SIZE = 8, 14
    SOURCE_VOCAB_SIZE, TARGET_VOCAB_SIZE = small_task.SOURCE_VOCAB, small_task.TARGET_VOCAB
    BATCH_SIZE, SOURCE_LEN, TARGET_LEN = small_task.B, small_task.T, small_task.L
    MAX_STEPS, DECAY_START = 4, 10


def _params(layers_as, remat, activation_dtype="float32", dispatch=Dispatch.EINSUM):
    p = _Experiment.params()
    p.task.activation_dtype = activation_dtype
    for stack, num_layers, group_size in ((p.task.encoder, 2, 12), (p.task.decoder, 4, 14)):
        stack.Set(layers_as=layers_as, remat=remat, num_layers=num_layers)
        stack.moe.Set(group_size=group_size, dispatch=dispatch)
    return p


def _start():
    """A state in the middle of training, as UNROLLED."""
    model = TranslationModel(_params(*_PLAIN), functions.partitioning(1))
    rng = np.random.default_rng(2)
    return NestedMap(
        step=np.int32(3),
        theta=building.random_theta(model.task),
        slots=model.state_spec.slots.Transform(
            lambda s: (1e-4 * rng.uniform(0.1, 1.0, s.shape)).astype("float32")
        ),
    )


class _Step:
    """The compiled training step of one way, of states as UNROLLED."""

    def __init__(self, way, num_partitions, **changes):
        params = _params(*way, **changes)
        model = TranslationModel(params, functions.partitioning(num_partitions))
        self._layers_as = way[0]
        self.executable = building.compile_fn(
            steps.train_step(model.model_fn, params),
            num_partitions,
            {f"state.{path}": spec.dims for path, spec in model.state_spec.FlattenItems()},
            state=model.state_spec,
            batch=small_task.batch_specs(),
        )

    def __call__(self, state):
        """NestedMap(state, metrics)."""
        if self._layers_as is Layers.LOOP:
            state = stacking.stacked(state, 2)
        result = self.executable(state, small_task.random_batch(3)).Transform(np.asarray)
        return NestedMap(result, state=stacking.unstacked(result.state))


@pytest.fixture(scope="module")
def step_of():
    """(way, partitions) -> _Step, compiled once."""
    return functools.cache(_Step)


def _assert_close(got, want, rtol=1e-4, atol=1e-6):
    assert got.IsCompatible(want)
    for (path, a), b in zip(got.FlattenItems(), want.Flatten(), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=path)


def test_a_recomputed_loop_does_the_same_step(step_of):
    """Loss, every layer's gradient norm and routing, weights and slots: draws are the same too."""
    got, want = step_of(_LOOP, 1)(_start()), step_of(_PLAIN, 1)(_start())
    _assert_close(got, want)
    before = _start().theta
    for (path, a), b in zip(got.state.theta.FlattenItems(), before.Flatten(), strict=True):
        assert (a != b).any(), path
    layers = {
        f"{stack}_{i}" for stack, count in (("encoder", 2), ("decoder", 4)) for i in range(count)
    }
    assert got.metrics.activation_norms.keys() == layers
    assert got.metrics.gradient_norms.keys() > layers
    assert set(got.metrics.routing.overflow) == {name for name in layers if name[-1] in "13"}
    assert got.metrics.skipped == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("way", _OTHERS)
def test_every_way_does_the_same_step(step_of, way):
    _assert_close(step_of(way, 2)(_start()), step_of(_PLAIN, 1)(_start()))


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [2, 4, 8])
def test_a_partitioned_loop_does_the_same_step(step_of, num_partitions):
    got, want = step_of(_LOOP, num_partitions)(_start()), step_of(_PLAIN, 1)(_start())
    _assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_partitioned_loop_moves_tokens_alone(step_of):
    """An MoE layer has 2 all-to-alls forward, 2 backward, 2 computed again; weights stay."""
    report = step_of(_LOOP, 2).executable.report()
    kinds = collections.Counter(op.kind for op in report.collective_ops)
    assert kinds.keys() == {"all-to-all", "all-reduce"}
    assert kinds["all-to-all"] == 2 * 6  # One in the encoder's loops, one in the decoder's.


@pytest.mark.slow
def test_what_is_kept_is_not_exchanged_again(step_of):
    report = step_of(_KEEPING, 2).executable.report()
    assert report.count("all-to-all") == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("way", [_LOOP, _KEEPING, (Layers.LOOP, Remat.NONE)])
def test_tokens_dispatched_by_indices_do_the_same_step(step_of, way):
    indexed = _Step(way, 2, dispatch=Dispatch.GATHER)
    _assert_close(indexed(_start()), step_of(_PLAIN, 1)(_start()), rtol=1e-3, atol=1e-5)
    moves = [op for op in indexed.executable.report().collective_ops if "feed_" in op.op_name]
    assert {op.kind for op in moves} == {"all-to-all", "all-reduce"}


@pytest.mark.slow
def test_steps_in_a_loop_over_layers_in_a_loop_are_one_step_after_the_other(step_of):
    params, parts = _params(*_LOOP), functions.partitioning(2)
    model, specs = TranslationModel(params, parts), small_task.batch_specs()
    step = steps.train_step(model.model_fn, params)
    both = compile_program(
        lowering.export(steps.trainer(step, model.state_spec, specs, 2, parts), parts)
    )
    batch = small_task.random_batch(3)
    got = both(stacking.stacked(_start(), 2), batch.Transform(lambda x: np.stack([x, x])))
    want = step_of(_LOOP, 2)(step_of(_LOOP, 2)(_start()).state)
    _assert_close(stacking.unstacked(got.state), want.state)


@pytest.mark.slow
def test_bfloat16_activations_in_a_partitioned_loop(step_of):
    narrow = _Step(_LOOP, 2, activation_dtype="bfloat16")(_start())
    wide = step_of(_LOOP, 2)(_start())
    np.testing.assert_allclose(narrow.metrics.loss, wide.metrics.loss, rtol=0.01)
    assert {leaf.dtype for leaf in narrow.state.theta.Flatten()} == {np.dtype("float32")}


@pytest.mark.parametrize(
    ("scale", "loss_is_finite"),
    [(np.inf, False), (1e25, True)],  # Logits of 1e25 have a loss, but gradients beyond float32.
)
@pytest.mark.parametrize("way", [_PLAIN, _LOOP])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step(
    step_of, way, scale, loss_is_finite
):
    state = _start()
    state.theta.softmax = (state.theta.softmax * scale).astype("float32")
    got = step_of(way, 1)(state)
    assert got.metrics.skipped == 1.0 and np.isfinite(got.metrics.loss) == loss_is_finite
    assert not np.isfinite(got.metrics.gradient_norms.encoder_0)
    assert got.state.step == state.step + 1
    for part in ("theta", "slots"):
        for (path, a), b in zip(got.state[part].FlattenItems(), state[part].Flatten(), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=path)


def test_a_loop_is_over_whole_blocks():
    params = _params(Layers.LOOP, Remat.NONE).task
    params.decoder.num_layers = 5
    with pytest.raises(ValueError, match="decoder: num_layers 5 cannot be a LOOP over blocks of 2"):
        params.Instantiate(building.Unannotated())
