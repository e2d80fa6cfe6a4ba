"""Routing by sentence against NumPy, and on several devices.

B batch, L length, M model, H hidden, G groups, S tokens of a group, E experts, C capacity.
"""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import gating
from lingvo_gshard.layers.attention import segment_mask
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.layers.gating_layers import SentenceTop2Gating
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.routing import statistics
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from tests import exhaustive
from tests.layers import building
from tests.spmd import functions
from xla_spmd.mesh import Mesh

# Groups of four tokens cut rows of six.
B, L, M, H, E, S = 16, 6, 5, 7, 8, 4
_CAPACITY = 2
_SEED = np.array([3, 4], np.int32)


def _params(**settings):
    p = MoELayer.Params().Set(dim=M, hidden_dim=H, num_experts=E, group_size=S)
    p.gating = SentenceTop2Gating.Params().Set(**settings)
    p.train_capacity.factor = _CAPACITY * E / S
    return p


def _segments():
    """Rows of one to three sentences and padding, and one row of padding alone."""
    rows = [[1, 1, 1, 2, 2, 3], [1, 1, 1, 1, 1, 1], [1, 2, 2, 2, 0, 0], [1, 1, 2, 0, 0, 0]]
    return np.array([*rows * 3, *rows[:3], [0] * L], np.int32)


def _arrays():
    rng = np.random.default_rng(7)
    return NestedMap(
        x_BLM=rng.standard_normal((B, L, M)).astype("float32"),
        segments_BL=_segments(),
        out_BLM=rng.standard_normal((B, L, M)).astype("float32"),
        seed=_SEED,
    )


_SPECS = NestedMap(
    x_BLM=functions.f32((B, L, M), "BLM"),
    segments_BL=TensorSpec((B, L), "int32", "BL"),
    out_BLM=functions.f32((B, L, M), "BLM"),
    seed=TensorSpec((2,), "int32", "_"),
)


def _context(segments_BL, seed=None):
    context = Context(Mode.EVAL if seed is None else Mode.TRAIN, seed)
    mask = segment_mask(segments_BL, segments_BL)
    return dataclasses.replace(context, sentence_mask=mask)


def _output(layer, theta, batch):
    valid_BL = tf.cast(batch.segments_BL > 0, tf.float32)
    context = _context(batch.segments_BL, batch.get("seed"))
    return layer.FProp(theta, batch.x_BLM, valid_BL, context)


def _sentence_logits(x_BLM, segments_BL, wg):
    """wg times the mean input of each token's sentence, token by token; 0 for padding."""
    means_BLM = np.zeros(x_BLM.shape)
    for b, segments_L in enumerate(segments_BL):
        for i, segment in enumerate(segments_L):
            if segment:
                tokens = [x_BLM[b, j] for j in range(L) if segments_L[j] == segment]
                means_BLM[b, i] = np.sum(tokens, 0, dtype=np.float64) / len(tokens)
    return means_BLM @ wg.astype(np.float64)


@pytest.mark.parametrize("capacity", [_CAPACITY, S])
def test_routing_equals_numpy(capacity):
    p = _params(second_expert=SecondExpert.ALL)
    p.train_capacity.factor = capacity * E / S
    layer = p.Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer)
    arrays = _arrays()
    y_BLM, routing = _output(layer, theta.Transform(tf.constant), arrays.Transform(tf.constant))

    logits_NE = _sentence_logits(arrays.x_BLM, arrays.segments_BL, theta.wg).reshape(-1, E)
    valid_BL = arrays.segments_BL > 0
    want_BLM = building.routed_output(theta, logits_NE, arrays.x_BLM, valid_BL, S, capacity)
    np.testing.assert_allclose(y_BLM, want_BLM, rtol=1e-4, atol=1e-5)
    is_padding = arrays.segments_BL == 0
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
    want_BLE = _sentence_logits(arrays.x_BLM, arrays.segments_BL, theta.wg)
    np.testing.assert_allclose(logits_GSE, want_BLE.reshape(-1, S, E), rtol=1e-4, atol=1e-5)


def test_packed_sentences_are_routed_as_rows_of_their_own():
    layer = _params().Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(layer).Transform(tf.constant)
    x_M = _arrays().x_BLM[0]

    def output(segments):
        segments_BL = np.array(segments, np.int32)
        rows = NestedMap(
            x_BLM=np.tile(x_M, (len(segments), 1, 1)), segments_BL=segments_BL
        ).Transform(tf.constant)
        return _output(layer, theta, rows)[0].numpy()

    packed = output([[1, 1, 2, 2, 2, 0], [0] * L])
    first, second = output([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0]])
    np.testing.assert_allclose(packed[0], first + second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["wg", "x_BLM"])
@pytest.mark.parametrize("which", ["output", "aux_loss"])
def test_gradients_agree_with_finite_differences(name, which):
    layer = _params(second_expert=SecondExpert.ALL).Instantiate(building.Unannotated(), "moe")
    arrays = _arrays().Transform(tf.constant)
    theta = building.random_theta(layer).Transform(tf.constant)
    inputs = NestedMap(theta, x_BLM=arrays.x_BLM)

    def loss(inputs):
        y_BLM, routing = _output(layer, inputs, NestedMap(arrays, x_BLM=inputs.x_BLM))
        output = tf.reduce_sum(y_BLM * arrays.out_BLM)
        return output if which == "output" else routing.aux_loss

    with tf.GradientTape() as tape:
        tape.watch(inputs[name])
        value = loss(inputs)
    gradient = tape.gradient(value, inputs[name])
    # In this direction no terms cancel, so that rounding is small beside the slope.
    direction = tf.sign(gradient)

    def moved(step):
        return loss(NestedMap(inputs, **{name: inputs[name] + step * direction}))

    # So small that no sentence changes its experts, where the loss is discontinuous.
    width = 2e-4
    slope = (moved(width) - moved(-width)) / (2 * width)
    assert abs(slope) > 1e-4
    np.testing.assert_allclose(tf.reduce_sum(gradient * direction), slope, rtol=0.02)


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
    "copies of experts": {"B": ("d", "m"), "G": ("d", "m"), "E": "d"},
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
