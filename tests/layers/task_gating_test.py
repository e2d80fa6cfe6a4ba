"""Routing by task against NumPy, and on several devices.

B batch, L length, M model, H hidden, G groups, S tokens of a group, E experts, C capacity, K tasks.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import gating
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.layers.gating_layers import TaskTop2Gating
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.routing import statistics
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from tests import exhaustive
from tests.layers import building
from tests.spmd import functions
from xla_spmd.mesh import Mesh

# Groups of four tokens cut rows of six.
B, L, M, H, E, S, K = 16, 6, 5, 7, 8, 4, 3
_FIRST_PIECE = 6
_CAPACITY = 2
_SEED = np.array([3, 4], np.int32)


def _params(**settings):
    p = MoELayer.Params().Set(dim=M, hidden_dim=H, num_experts=E, group_size=S)
    tasks = {"num_tasks": K, "first_piece": _FIRST_PIECE}
    p.gating = TaskTop2Gating.Params().Set(**tasks, **settings)
    p.train_capacity.factor = _CAPACITY * E / S
    return p


def _pieces():
    """The first piece of each token's sentence, 0 for padding: rows of one to three tasks."""
    rows = [[6, 6, 6, 8, 8, 7], [7, 7, 7, 7, 7, 7], [8, 6, 6, 6, 0, 0], [6, 6, 7, 0, 0, 0]]
    return np.array([*rows * 3, *rows[:3], [0] * L], np.int32)


def _arrays():
    rng = np.random.default_rng(7)
    return NestedMap(
        x_BLM=rng.standard_normal((B, L, M)).astype("float32"),
        pieces_BL=_pieces(),
        out_BLM=rng.standard_normal((B, L, M)).astype("float32"),
        seed=_SEED,
    )


_SPECS = NestedMap(
    x_BLM=functions.f32((B, L, M), "BLM"),
    pieces_BL=TensorSpec((B, L), "int32", "BL"),
    out_BLM=functions.f32((B, L, M), "BLM"),
    seed=TensorSpec((2,), "int32", "_"),
)


def _output(layer, theta, batch):
    seed = batch.get("seed")
    context = Context(Mode.EVAL if seed is None else Mode.TRAIN, seed)
    context = dataclasses.replace(context, first_pieces=batch.pieces_BL)
    valid_BL = tf.cast(batch.pieces_BL > 0, tf.float32)
    return layer.FProp(theta, batch.x_BLM, valid_BL, context)


def _task_logits(pieces_BL, embedding_KM, wg_ME):
    """wg times the embedding of each token's task, token by token; 0 for padding."""
    logits_BLE = np.zeros((*pieces_BL.shape, E))
    for b, pieces_L in enumerate(pieces_BL):
        for i, piece in enumerate(pieces_L):
            if piece:
                task_M = embedding_KM[piece - _FIRST_PIECE].astype(np.float64)
                logits_BLE[b, i] = task_M @ wg_ME.astype(np.float64)
    return logits_BLE


@pytest.mark.parametrize("capacity", [_CAPACITY, S])
def test_routing_equals_numpy(capacity):
    p = _params(second_expert=SecondExpert.ALL)
    p.train_capacity.factor = capacity * E / S
    layer = p.Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer)
    arrays = _arrays()
    y_BLM, routing = _output(layer, theta.Transform(tf.constant), arrays.Transform(tf.constant))

    logits_NE = _task_logits(arrays.pieces_BL, theta.gate.embedding, theta.wg).reshape(-1, E)
    valid_BL = arrays.pieces_BL > 0
    want_BLM = building.routed_output(theta, logits_NE, arrays.x_BLM, valid_BL, S, capacity)
    np.testing.assert_allclose(y_BLM, want_BLM, rtol=1e-4, atol=1e-5)
    is_padding = arrays.pieces_BL == 0
    assert not y_BLM.numpy()[is_padding].any()
    assert (routing.overflow_second.numpy() > 0) == (capacity < S)


def test_logits_equal_numpy(monkeypatch):
    arrays = _arrays()
    layer = _params().Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer)
    passed = []
    top2_gating = gating.top2_gating

    def noted(logits_GSE, *args, **kwargs):
        passed.append(logits_GSE)
        return top2_gating(logits_GSE, *args, **kwargs)

    monkeypatch.setattr(gating, "top2_gating", noted)
    _output(layer, theta.Transform(tf.constant), arrays.Transform(tf.constant))
    (logits_GSE,) = passed
    want_BLE = _task_logits(arrays.pieces_BL, theta.gate.embedding, theta.wg)
    np.testing.assert_allclose(logits_GSE, want_BLE.reshape(-1, S, E), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["wg", "embedding"])
@pytest.mark.parametrize("which", ["output", "aux_loss"])
def test_gradients_agree_with_finite_differences(name, which):
    layer = _params(second_expert=SecondExpert.ALL).Instantiate(building.Unannotated(), "moe")
    arrays = _arrays().Transform(tf.constant)
    theta = building.random_theta(layer).Transform(tf.constant)
    weight = theta.wg if name == "wg" else theta.gate.embedding

    def loss(weight):
        changed = {"wg": weight} if name == "wg" else {"gate": NestedMap(embedding=weight)}
        y_BLM, routing = _output(layer, NestedMap(theta, **changed), arrays)
        output = tf.reduce_sum(y_BLM * arrays.out_BLM)
        return output if which == "output" else routing.aux_loss

    with tf.GradientTape() as tape:
        tape.watch(weight)
        value = loss(weight)
    gradient = tape.gradient(value, weight)
    # In this direction no terms cancel, so that rounding is small beside the slope.
    direction = tf.sign(gradient)

    # So small that no task changes its experts, where the loss is discontinuous.
    width = 2e-4
    slope = (loss(weight + width * direction) - loss(weight - width * direction)) / (2 * width)
    assert abs(slope) > 1e-4
    np.testing.assert_allclose(tf.reduce_sum(gradient * direction), slope, rtol=0.02)


def test_a_wrong_shape_and_a_missing_task_are_refused():
    layer = _params().Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer).Transform(tf.constant)
    arrays = _arrays().Transform(tf.constant)
    wrong = NestedMap(arrays, pieces_BL=arrays.pieces_BL[:, :-1])
    context = Context(Mode.EVAL, first_pieces=wrong.pieces_BL)
    valid_BL = tf.ones([B, L])
    expected = r"moe.gate: first_pieces has the shape \(16, 5\), expected .* 96 tokens\.$"
    with pytest.raises(ValueError, match=expected):
        layer.FProp(theta, arrays.x_BLM, valid_BL, context)
    with pytest.raises(ValueError, match="moe.gate: TaskTop2Gating needs the token that begins a "):
        layer.FProp(theta, arrays.x_BLM, valid_BL, Context(Mode.EVAL))


@pytest.mark.parametrize(("name", "value"), [("num_tasks", 0), ("first_piece", -1)])
def test_settings_out_of_their_ranges_are_refused(name, value):
    p = _params()
    p.gating.Set(**{name: value})
    with pytest.raises(ValueError, match=f"moe.gate: {name} must be .* or more, got"):
        p.Instantiate(building.Unannotated(), "moe")


def _forward_backward(layer):
    def fn(theta, batch):
        leaves = [*theta.Flatten(), batch.x_BLM]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y_BLM, routing = _output(layer, theta, batch)
            loss = tf.reduce_sum(y_BLM * batch.out_BLM) + 30.0 * routing.aux_loss
        *d_theta, d_x_BLM = tape.gradient(loss, leaves)
        return NestedMap(
            y_BLM=y_BLM,
            routing=NestedMap(statistics(routing.by_name())),
            d_theta=theta.Pack(d_theta),
            d_x_BLM=d_x_BLM,
        )

    return fn


@functools.cache
def _eager():
    """The results of one device, operation by operation."""
    layer = _params().Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer).Transform(tf.constant)
    return _forward_backward(layer)(theta, _arrays().Transform(tf.constant))


_TABLES = {
    "the paper's": {"B": ("d", "m"), "G": ("d", "m"), "E": ("d", "m")},
    "experts x hidden": {"B": "d", "G": "d", "E": "d", "H": "m"},
}
_MESHES = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (4, 2)}


def _case(num_partitions, table):
    marks = [pytest.mark.slow] if num_partitions == 8 else exhaustive.RARE
    is_quick = num_partitions == 8 and table == "experts x hidden"
    return pytest.param(num_partitions, table, marks=[] if is_quick else marks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_partitions", "table"), [_case(n, table) for n in _MESHES for table in _TABLES]
)
def test_partitioned_equals_unpartitioned(num_partitions, table):
    """Random routing is on, and buffers overflow."""
    parts = Partitioning.from_dict(Mesh(("d", "m"), _MESHES[num_partitions]), _TABLES[table])
    layer = _params().Instantiate(Annotator(parts), "moe")
    specs = building.theta_specs(layer)
    dims = building.dims_of(d_theta=specs) | {"y_BLM": "BLM", "d_x_BLM": "BLM"}
    executable = building.compile_fn(
        _forward_backward(layer), parts, dims, theta=specs, batch=_SPECS
    )
    got = executable(building.random_theta(layer), _arrays())
    building.assert_close(got, _eager())
    assert got.routing.overflow_first > 0
