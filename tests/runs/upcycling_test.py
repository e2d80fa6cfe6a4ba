"""Upcycling: a run without experts starts a model whose experts are copies of its feed-forwards.

With normalized gates and without overflow, the new model computes the same as the old one, whatever
its gates choose: g1 / (g1 + g2) * FFN(x) + g2 / (g1 + g2) * FFN(x) = FFN(x).
"""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.checkpoints import restacked
from lingvo_gshard.checkpoints.warm_start import WarmStart
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating import CapacityBy, SecondExpert
from lingvo_gshard.layers.gating_layers import TopKGating
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.runs import run
from lingvo_gshard.train.hooks import TrainHook
from tests import exhaustive
from tests.checkpoints import in_memory
from tests.layers import building
from tests.model import small_task

_RULES = (
    (r"theta\..*\.feed_forward\.wg", "NEW"),
    (r"theta\..*\.feed_forward\..*", "COPY_EXPERTS"),
    (r"theta\..*", "SAME"),
)


class _Dense(small_task.Experiment):
    NUM_EXPERTS = None
    DROPOUT = 0.0


class _Upcycled(_Dense):
    NUM_EXPERTS = small_task.E


def _params(experiment, layers_as=Layers.UNROLLED, num_layers=2):
    """Returns an experiment's settings, without overflow and with two experts for each token.

    Each stack has `num_layers` layers.
    """
    p = experiment.params()
    for stack, group_size in ((p.task.encoder, 12), (p.task.decoder, 14)):
        stack.Set(layers_as=layers_as, num_layers=num_layers)
        if stack.moe is not None:
            stack.moe.group_size = group_size
            stack.moe.gating.second_expert = SecondExpert.ALL
            stack.moe.train_capacity.by = CapacityBy.TOKENS
    return p


def _logits(task, theta, batch):
    """Returns the logits of all tokens, computed eagerly, float32 [tokens, V]."""
    logits, _ = task.FProp(
        theta.Transform(tf.constant), batch.features.Transform(tf.constant), Context(Mode.EVAL)
    )
    return logits.numpy()[batch.labels.target_weights > 0]


@pytest.mark.parametrize(
    ("before", "after", "gating"),
    [
        (Layers.UNROLLED, Layers.UNROLLED, None),
        pytest.param(Layers.LOOP, Layers.LOOP, None, marks=pytest.mark.slow),
        *(
            pytest.param(before, after, gating, marks=exhaustive.RARE)
            for before, after, gating in [
                (Layers.UNROLLED, Layers.LOOP, None),
                (Layers.LOOP, Layers.UNROLLED, None),
                (Layers.UNROLLED, Layers.UNROLLED, TopKGating.Params().Set(k=3)),
            ]
        ),
    ],
)
def test_an_upcycled_model_has_the_logits_of_the_dense_one(before, after, gating):
    batch = small_task.random_batch(0)
    dense = _params(_Dense, before, 4).task.Instantiate(building.Unannotated())
    params = _params(_Upcycled, after, 4)
    if gating is not None:
        for stack in (params.task.encoder, params.task.decoder):
            stack.moe.gating = gating.Copy()
    upcycled = params.task.Instantiate(building.Unannotated())

    theta = building.random_theta(dense)
    first = building.random_theta(upcycled, seed=2)
    old = restacked.Renamed(
        _saved(NestedMap(theta=theta), NestedMap(theta=dense.weight_specs)),
        dict(NestedMap(theta=first).FlattenItems()),
    )
    start = WarmStart("dense", _RULES)
    values = []
    for (path, leaf), spec in zip(
        first.FlattenItems(), upcycled.weight_specs.Flatten(), strict=True
    ):
        value, _ = start.first_value(f"theta.{path}", spec.dims, old, jnp.asarray(leaf))
        values.append(np.asarray(value))

    wanted = _logits(dense, theta, batch)
    found = _logits(upcycled, first.Pack(values), batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert old.left() == [] and wanted.std() > 0.1


def _saved(theta, specs):
    """Returns weights by path, as a checkpoint's arrays."""
    specs = dict(specs.FlattenItems())
    return {
        path: in_memory.array(value, specs[path].dims, path) for path, value in theta.FlattenItems()
    }


class _SameBatch:
    """Repeats a batch forever."""

    def __init__(self):
        self.specs = small_task.batch_specs()

    def __iter__(self):
        return self

    def __next__(self):
        return small_task.random_batch(1)

    def get_state(self):
        """Returns an empty state."""
        return {}

    def set_state(self, state):
        """Ignores the state."""


def _input(params):
    del params
    return _SameBatch()


class _Losses(TrainHook):
    """Records the cross entropy of each step, before its update."""

    def __init__(self):
        self.values = []

    def after_call(self, call):
        """Records the cross entropies of a call."""
        self.values += np.asarray(call.metrics.nll).tolist()


@pytest.fixture(scope="module")
def dense_run(request, tmp_path_factory):
    """The weights of a run without experts, and the cross entropy of its next step.

    Its parameter is how the program applied the layers.
    """
    folder = tmp_path_factory.mktemp("dense")
    losses = _Losses()
    estimator = run.make_estimator(_params(_Dense, request.param), str(folder / "run"), 1)
    estimator.train(_input, max_steps=1)
    estimator.export_weights(folder / "dense.safetensors")
    estimator.train(_input, max_steps=2, hooks=[losses])
    return folder / "dense.safetensors", losses.values[0]


def _upcycled_run(params, weights, folder, num_partitions):
    params.train.Set(warm_start_from=str(weights), warm_start_rules=_RULES)
    return run.make_estimator(params, str(folder), num_partitions)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense_run", "num_partitions", "layers_as"),
    [
        pytest.param(Layers.UNROLLED, 1, Layers.UNROLLED, marks=pytest.mark.exhaustive),
        pytest.param(Layers.UNROLLED, 4, Layers.LOOP, marks=pytest.mark.exhaustive),
        pytest.param(Layers.LOOP, 2, Layers.UNROLLED, marks=pytest.mark.exhaustive),
        (Layers.LOOP, 8, Layers.LOOP),
    ],
    indirect=["dense_run"],
)
def test_an_upcycled_run_starts_with_the_loss_of_the_dense_one(
    dense_run, num_partitions, layers_as, tmp_path, capsys
):
    weights, wanted = dense_run
    losses = _Losses()
    estimator = _upcycled_run(_params(_Upcycled, layers_as), weights, tmp_path, num_partitions)
    estimator.train(_input, max_steps=3, hooks=[losses])

    assert losses.values[0] == pytest.approx(wanted, rel=1e-5)
    assert losses.values[2] < losses.values[0]  # The experts are trained.
    printed = capsys.readouterr().out
    assert "feed_forward.wg: new, float32" in printed and "not used" not in printed
