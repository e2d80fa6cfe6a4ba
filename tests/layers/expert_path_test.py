"""Both ways without a capacity equal Algorithm 2 where nothing overflows.

B batch, L length, M model, H hidden.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import moe
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating import Capacity, CapacityBy, SecondExpert
from lingvo_gshard.layers.gating_layers import Top2Gating
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from tests import exhaustive
from tests.layers import building
from tests.spmd import functions
from xla_spmd.mesh import Mesh

B, L, M, H = 16, 6, 5, 7
_MODES = (Mode.PREDICT, Mode.EVAL, Mode.TRAIN)


@pytest.fixture(params=[8, 0], ids=["ragged", "in rounds"])
def rounds(request, monkeypatch):
    """With 0 likely rounds, dispatch in rounds always seems cheaper."""
    monkeypatch.setattr(moe, "_LIKELY_ROUNDS", request.param)
    return request.param == 0


def _params(num_experts):
    """In TRAIN mode, Algorithm 2 without random draws and with capacity for all tokens."""
    return MoELayer.Params().Set(
        dim=M,
        hidden_dim=H,
        num_experts=num_experts,
        group_size=L,
        gating=Top2Gating.Params().Set(second_expert=SecondExpert.ALL),
        train_capacity=Capacity.Params().Set(by=CapacityBy.TOKENS),
    )


def _batch(seed=7):
    rng = np.random.default_rng(seed)
    x_BLM = rng.standard_normal((B, L, M)).astype("float32")
    valid_BL = (rng.random((B, L)) < 0.8).astype("float32")
    return NestedMap(x_BLM=x_BLM, valid_BL=valid_BL)


def _eager(params, theta, batch, mode):
    layer = params.Instantiate(building.Unannotated(), "moe")
    weights, batch = theta.Transform(tf.constant), batch.Transform(tf.constant)
    context = Context(mode, tf.constant([1, 2]) if mode is Mode.TRAIN else None)
    return layer.FProp(weights, batch.x_BLM, batch.valid_BL, context)[0].numpy()


def _theta(params):
    return building.random_theta(params.Instantiate(building.Unannotated(), "moe"))


@pytest.mark.parametrize("num_experts", [1, 8])
def test_equals_algorithm_2(num_experts, rounds):
    params = _params(num_experts)
    theta = _theta(params)
    decoded, evaluated, want = (_eager(params, theta, _batch(), mode) for mode in _MODES)
    np.testing.assert_allclose(decoded, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(evaluated, want, rtol=1e-4, atol=1e-5)
    assert (np.abs(decoded).max(-1) > 0).all(where=_batch().valid_BL > 0)
    assert not decoded[_batch().valid_BL == 0].any()


def test_all_tokens_may_choose_the_same_experts(rounds):
    params = _params(8)
    theta, batch = _theta(params), _batch()
    batch.x_BLM = np.tile(batch.x_BLM[:1, :1], (B, L, 1))
    got, want = (_eager(params, theta, batch, mode) for mode in (Mode.PREDICT, Mode.TRAIN))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_products_have_dtype_of_tokens(rounds):
    params, batch = _params(4), _batch()
    theta, want = _theta(params), _eager(params, _theta(params), batch, Mode.PREDICT)
    batch.x_BLM = batch.x_BLM.astype(tf.bfloat16.as_numpy_dtype)
    got = _eager(params, theta, batch, Mode.PREDICT)
    assert got.dtype == batch.x_BLM.dtype
    near = np.isclose(got.astype("float32"), want, rtol=0.1, atol=0.1).all(-1)
    assert near.mean() > 0.9  # After rounding, some tokens choose other experts.


def test_only_padding_gives_zeros(rounds):
    params, batch = _params(4), _batch()
    batch.valid_BL = np.zeros_like(batch.valid_BL)
    assert not _eager(params, _theta(params), batch, Mode.PREDICT).any()


_DATA = Partitioning.from_dict(Mesh.flat(4), {"B": "d", "G": "d"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "num_experts", "split"),
    [
        (functions.partitioning(2), 8, True),
        (building.REPLICATED_EXPERTS, 4, True),
        pytest.param(_DATA, 8, False, marks=exhaustive.RARE),
        pytest.param(functions.partitioning(4), 8, True, marks=exhaustive.RARE),
        (functions.partitioning(8), 8, True),
    ],
    ids=["2 devices", "replicated experts", "data parallel", "4 devices", "8 devices"],
)
@pytest.mark.parametrize("dispatch", [Dispatch.EINSUM, Dispatch.GATHER])
def test_partitioned_equals_unpartitioned(parts, num_experts, split, rounds, dispatch):
    """A round dispatches and combines; an all-reduce finds the number of rounds."""
    if dispatch is Dispatch.GATHER and not rounds:
        return  # Ragged experts don't dispatch.
    params, batch = _params(num_experts).Set(dispatch=dispatch), _batch()
    layer, theta = params.Instantiate(Annotator(parts), "moe"), _theta(params)

    def fn(theta, batch):
        y_BLM, _ = layer.FProp(theta, batch.x_BLM, batch.valid_BL, Context(Mode.PREDICT))
        return NestedMap(y_BLM=y_BLM)

    specs = NestedMap(x_BLM=functions.f32((B, L, M), "BLM"), valid_BL=functions.f32((B, L), "BL"))
    args = {"theta": building.theta_specs(layer), "batch": specs}
    run = building.compile_fn(fn, parts, {"y_BLM": "BLM"}, **args)
    want = _eager(params, theta, batch, Mode.TRAIN)
    np.testing.assert_allclose(run(theta, batch).y_BLM, want, rtol=1e-4, atol=1e-5)
    report = run.report()
    kinds = ("all-gather", "all-to-all", "all-reduce")
    want = (0, 2 * split, 1) if rounds else (split, split, 0)
    assert tuple(report.count(kind) for kind in kinds) == want


@pytest.mark.parametrize(
    ("num_devices", "tokens", "num_experts", "ragged"),
    [
        (1, 4096, 8, True),
        (8, 4096, 8, True),
        (8, 32, 8, True),
        (128, 128 * 4096, 128, False),
        (2048, 2048 * 4096, 2048, False),
        (2048, 2048 * 32, 2048, False),
        (2, 2 * 32, 2048, True),
    ],
)
def test_few_partitions_gather_and_many_dispatch(num_devices, tokens, num_experts, ragged):
    num_groups = max(num_devices, tokens // 1024)
    capacity = Capacity.Params().Instantiate().even_places(tokens // num_groups, num_experts)
    annotator = Annotator(functions.partitioning(num_devices))
    buffer_rows = num_experts * num_groups * capacity
    assert moe.gathering_moves_less(tokens, buffer_rows, annotator) == ragged


_FACTOR = Capacity.Params().Set(by=CapacityBy.FACTOR)


@pytest.mark.parametrize(
    ("mode", "num_devices", "settings", "want"),
    [
        (Mode.TRAIN, 1, {}, ("Buffers", 64)),
        (Mode.TRAIN, 1, {"train_capacity": _FACTOR}, ("Buffers", 16)),
        (Mode.TRAIN, 1, {"dispatch": Dispatch.RAGGED}, ("Ragged", 64)),
        (Mode.EVAL, 1, {}, ("Ragged", 64)),
        (Mode.PREDICT, 1, {"eval_capacity": _FACTOR}, ("Buffers", 16)),
        (Mode.EVAL, 128, {}, ("Rounds", 64)),
    ],
)
def test_mode_settings_and_mesh_decide_the_way(mode, num_devices, settings, want):
    """Groups of 64 tokens; two of 8 experts have 16 places each for all of them."""
    params = _params(8).Set(**settings)
    annotator = Annotator(functions.partitioning(num_devices))
    path = moe.expert_path(params, mode, 2 * num_devices, 64, annotator)
    assert (type(path).__name__, path.capacity) == want
    if isinstance(path, moe.Rounds):
        assert path.buffers.capacity == 16


def test_training_without_a_capacity_needs_even_parts():
    """Tokens are in two parts, which two copies of the experts share."""
    params = _params(4).Set(dispatch=Dispatch.RAGGED)
    message = "^dispatch=RAGGED: 27 tokens of a batch are not divisible by the 2 parts"
    with pytest.raises(ValueError, match=message):
        moe.expert_path(params, Mode.TRAIN, 3, 9, Annotator(building.REPLICATED_EXPERTS))
