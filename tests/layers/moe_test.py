"""The MoE layer: partitioned equals unpartitioned, with two all-to-alls in each direction.

B batch, L length, M model, H hidden, E experts, S tokens of a group.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import moe, moe_sizes
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating import CapacityBy, SecondExpert
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.routing import statistics
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from tests import exhaustive
from tests.layers import building
from tests.spmd import functions

B, L, M, H, E, S = 16, 6, 5, 7, 8, 12
_SEED = np.array([3, 4], np.int32)
_BUFFERS = (Dispatch.EINSUM, Dispatch.GATHER)  # These dispatch tokens to buffers.


def _params(**changes):
    p = MoELayer.Params().Set(dim=M, hidden_dim=H, num_experts=E, group_size=S)
    return p.Set(**changes)


def _arrays():
    rng = np.random.default_rng(7)
    x_BLM = rng.standard_normal((B, L, M)).astype("float32")
    valid_BL = (rng.random((B, L)) < 0.8).astype("float32")
    out_BLM = rng.standard_normal((B, L, M)).astype("float32")
    return NestedMap(x_BLM=x_BLM, valid_BL=valid_BL, out_BLM=out_BLM, seed=_SEED)


_SPECS = NestedMap(
    x_BLM=functions.f32((B, L, M), "BLM"),
    valid_BL=functions.f32((B, L), "BL"),
    out_BLM=functions.f32((B, L, M), "BLM"),
    seed=TensorSpec((2,), "int32", "_"),
)


_COUNTS = [
    2,
    pytest.param(4, marks=exhaustive.RARE),
    pytest.param(8, marks=pytest.mark.slow),
]


def _forward(layer):
    def fn(theta, batch):
        context = Context(Mode.TRAIN, batch.seed)
        y_BLM, routing = layer.FProp(theta, batch.x_BLM, batch.valid_BL, context)
        return NestedMap(y_BLM=y_BLM, routing=NestedMap(statistics(routing.by_name())))

    return fn


def _forward_backward(layer):
    def fn(theta, batch):
        leaves = [*theta.Flatten(), batch.x_BLM]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            result = _forward(layer)(theta, batch)
            loss = tf.reduce_sum(result.y_BLM * batch.out_BLM) + 30.0 * result.routing.aux_loss
        *d_theta, d_x_BLM = tape.gradient(loss, leaves)
        return NestedMap(result, d_theta=theta.Pack(d_theta), d_x_BLM=d_x_BLM)

    return fn


@functools.cache
def _trained(partitions, dispatch=Dispatch.EINSUM, num_experts=E, dropout=0.0):
    """The executable of a forward and backward pass, and its results."""
    parts = functions.partitioning(partitions) if isinstance(partitions, int) else partitions
    layer = _trained_params(dispatch, num_experts, dropout).Instantiate(Annotator(parts), "moe")
    specs = building.theta_specs(layer)
    dims = building.dims_of(d_theta=specs) | {"y_BLM": "BLM", "d_x_BLM": "BLM"}
    executable = building.compile_fn(
        _forward_backward(layer), parts, dims, theta=specs, batch=_SPECS
    )
    return executable, executable(building.random_theta(layer), _arrays())


def _trained_params(dispatch, num_experts, dropout):
    return _params(dispatch=dispatch, num_experts=num_experts, **{"hidden_dropout.rate": dropout})


@functools.cache
def _unpartitioned(dispatch=Dispatch.EINSUM, num_experts=E, dropout=0.0):
    """The results of a forward and backward pass on one device, operation by operation."""
    params = _trained_params(dispatch, num_experts, dropout)
    return _run_eagerly(params, _arrays())


def _run_eagerly(params, arrays, theta=None):
    layer = params.Instantiate(building.Unannotated(), "moe")
    return building.run_eagerly(
        _forward_backward(layer), theta=theta or building.random_theta(layer), batch=arrays
    )


def test_no_result_is_trivial():
    for path, array in _unpartitioned().FlattenItems():
        assert np.abs(array).max() > 0 or path == "routing.idle_experts", path


def test_both_dispatches_are_equal():
    building.assert_close(_unpartitioned(Dispatch.GATHER), _unpartitioned())


@pytest.mark.parametrize("dispatch", _BUFFERS)
@pytest.mark.parametrize("num_partitions", _COUNTS)
def test_partitioned_equals_unpartitioned_with_four_all_to_alls(num_partitions, dispatch):
    executable, got = _trained(num_partitions, dispatch)
    building.assert_close(got, _unpartitioned())
    assert _collectives(executable) == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [*exhaustive.only(2, 4), 8])
def test_hidden_dropout_is_the_same_on_any_number_of_partitions(num_partitions):
    executable, got = _trained(num_partitions, dropout=0.4)
    building.assert_close(got, _unpartitioned(dropout=0.4))
    assert _collectives(executable) == (4, 0)
    assert np.abs(np.asarray(got.y_BLM) - _unpartitioned().y_BLM).max() > 0.1


@pytest.mark.parametrize(
    "dispatch", [Dispatch.EINSUM, pytest.param(Dispatch.GATHER, marks=pytest.mark.slow)]
)
def test_forward_has_two_all_to_alls(dispatch):
    assert _collectives(_compile_forward(2, dispatch=dispatch)) == (2, 0)


def _compile_forward(num_partitions, **changes):
    layer = _params(**changes).Instantiate(Annotator(functions.partitioning(num_partitions)), "moe")
    args = {"theta": building.theta_specs(layer), "batch": _SPECS}
    return building.compile_fn(_forward(layer), num_partitions, {"y_BLM": "BLM"}, **args)


def _collectives(executable):
    report = executable.report()
    return report.count("all-to-all"), report.count("all-gather")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "dispatch"),
    [
        (building.REPLICATED_EXPERTS, Dispatch.EINSUM),
        (building.REPLICATED_EXPERTS, Dispatch.GATHER),
        pytest.param(functions.partitioning(4), Dispatch.EINSUM, marks=exhaustive.RARE),
        pytest.param(functions.partitioning(2), Dispatch.GATHER, marks=exhaustive.RARE),
    ],
)
def test_four_experts_on_more_as_many_and_fewer_devices(parts, dispatch):
    executable, got = _trained(parts, dispatch, 4)
    building.assert_close(got, _unpartitioned(num_experts=4))
    assert _collectives(executable) == (4, 0)
    assert got.d_theta.wi.addressable_shards[0].data.shape == (4 // parts.factor("E")[0], M, H)


def _theta():
    return building.random_theta(_params().Instantiate(building.Unannotated(), "moe"))


def _eager(params, theta, x_BLM, valid_BL, mode=Mode.EVAL):
    layer = params.Instantiate(building.Unannotated(), "moe")
    context = Context(mode, tf.constant(_SEED) if mode is Mode.TRAIN else None)
    y_BLM, routing = layer.FProp(theta, tf.constant(x_BLM), tf.constant(valid_BL), context)
    return y_BLM.numpy(), routing


def test_padding_gives_zero_and_does_not_affect_tokens():
    arrays = _arrays()
    noise = np.random.default_rng(8).standard_normal((B, L, M)).astype("float32") * 9
    arrays.x_BLM = np.where(arrays.valid_BL[..., None] > 0, arrays.x_BLM, noise)
    got = _run_eagerly(_params(), arrays)
    want = _unpartitioned()
    np.testing.assert_array_equal(got.y_BLM, want.y_BLM)
    np.testing.assert_allclose(got.routing.aux_loss, want.routing.aux_loss, rtol=1e-6)
    assert not want.y_BLM[arrays.valid_BL == 0].any()


def test_only_training_drops_tokens_beyond_capacity():
    theta, arrays = _theta(), _arrays()
    # Every token chooses expert 0, then expert 1, which it always asks for, since g2 = 1/2.
    theta.wg[:] = 0
    got = _run_eagerly(_params(), arrays, theta)
    capacity, valid_GS = 2 * S // E, arrays.valid_BL.reshape(-1, S)
    dropped = np.maximum(valid_GS.sum(1) - capacity, 0).sum()
    np.testing.assert_allclose(got.routing.overflow, dropped / valid_GS.sum(), rtol=1e-6)
    np.testing.assert_allclose(got.routing.load_E, [E / 2, E / 2] + [0] * (E - 2))
    assert _eager(_params(), theta, arrays.x_BLM, arrays.valid_BL)[1].overflow == 0


def test_second_choices_that_do_not_ask_leave_their_places_to_others():
    theta, arrays = _theta(), _arrays()
    found = {}
    for second in SecondExpert:
        params = _params(**{"gating.second_expert": second})
        _, routing = _eager(params, theta, arrays.x_BLM, arrays.valid_BL, Mode.TRAIN)
        found[second] = np.array([routing.second_dispatched, routing.overflow_second])
    (sent, full), (sent_counted, full_counted), (sent_all, _) = found.values()
    assert sent + full == pytest.approx(sent_counted + full_counted)  # The same tokens ask.
    assert full < full_counted and sent_all > sent > sent_counted


@pytest.mark.parametrize("dispatch", _BUFFERS)
def test_decoding_routes_each_example_separately(dispatch):
    theta, arrays = _theta(), _arrays()
    params = _params(dispatch=dispatch, **{"eval_capacity.by": CapacityBy.FACTOR})
    both, _ = _eager(params, theta, arrays.x_BLM, arrays.valid_BL, Mode.PREDICT)
    alone, _ = _eager(params, theta, arrays.x_BLM[3:4], arrays.valid_BL[3:4], Mode.PREDICT)
    np.testing.assert_allclose(both[3:4], alone, rtol=1e-5, atol=1e-6)


def test_group_size_that_does_not_divide_tokens_is_refused():
    message = r"moe: group_size 7 does not divide .* 96 tokens \(16 x 6\)"
    with pytest.raises(ValueError, match=message):
        _eager(_params(group_size=7), NestedMap(), _arrays().x_BLM, _arrays().valid_BL)


@pytest.mark.parametrize(
    ("hidden_dim", "num_experts", "tokens", "want"),
    [
        (8192, 128, 2**20, 512),  # The largest divisor that is at most 8192 / 10.
        (8192, 2048, 2**22, 2048),  # 2048 groups, one for each expert; C is 2.
        (8192, 2048, 2**20, 1024),  # C is 1: with fewer tokens it would be a fraction.
        (8192, 128, 100, 100),
        (7, 8, 96, 12),
        (7, 2, 97, 1),
    ],
)
def test_default_group_size(hidden_dim, num_experts, tokens, want):
    p = _params(hidden_dim=hidden_dim, num_experts=num_experts, group_size=None)
    assert moe_sizes.group_size(p, tokens) == want
    assert moe_sizes.group_size(p.Set(group_size=5), tokens) == 5


@pytest.mark.parametrize(
    ("hidden_dim", "num_experts", "tokens", "want"),
    [(8192, 128, 2**20, 512), (8192, 512, 2**20, 512), (8192, 2048, 2**22, 1024), (7, 8, 96, 4)],
)
def test_cheap_group_size(hidden_dim, num_experts, tokens, want):
    """The largest divisor that is at most H / 10 or E / 2."""
    p = _params(hidden_dim=hidden_dim, num_experts=num_experts)
    assert moe_sizes.cheap_group_size(p, tokens) == want


def test_layer_uses_default_group_size():
    theta, arrays = _theta(), _arrays()

    def trained(group_size):
        params = _params(group_size=group_size)
        return _eager(params, theta, arrays.x_BLM, arrays.valid_BL, Mode.TRAIN)[0]

    np.testing.assert_array_equal(trained(None), trained(12))
    # Which tokens overflow depends on the groups.
    assert (trained(None) != trained(4)).any()


def _losses():
    """A function from a tree of theta and x_BLM to (sum of y * out, l_aux), and such a tree."""
    layer = _params().Instantiate(building.Unannotated(), "moe")
    arrays = _arrays()
    context = Context(Mode.TRAIN, tf.constant(_SEED))

    def losses(inputs):
        y_BLM, routing = layer.FProp(inputs, inputs.x_BLM, tf.constant(arrays.valid_BL), context)
        return tf.reduce_sum(y_BLM * arrays.out_BLM), routing.aux_loss

    theta = building.random_theta(layer)
    return losses, NestedMap(theta, x_BLM=arrays.x_BLM).Transform(tf.constant)


@pytest.mark.parametrize(
    ("name", "which"),
    [("wg", 0), ("wi", 0), ("wo", 0), ("x_BLM", 0), ("wg", 1), ("x_BLM", 1)],
    ids=["gate", "experts' wi", "experts' wo", "input", "aux of gate", "aux of input"],
)
def test_gradients_agree_with_finite_differences(name, which):
    """By one dispatch: test_both_dispatches_are_equal compares their gradients."""
    losses, inputs = _losses()
    with tf.GradientTape() as tape:
        tape.watch(inputs[name])
        value = losses(inputs)[which]
    gradient = tape.gradient(value, inputs[name])
    # In this direction no terms cancel, so that rounding is small beside the slope.
    direction = tf.sign(gradient)

    def loss(step):
        return losses(NestedMap(inputs, **{name: inputs[name] + step * direction}))[which]

    # So small that no token changes its experts, where the loss is discontinuous.
    width = 2e-4
    slope = (loss(width) - loss(-width)) / (2 * width)
    assert abs(slope) > 1e-4
    np.testing.assert_allclose(tf.reduce_sum(gradient * direction), slope, rtol=0.02)


@pytest.mark.slow
def test_an_evaluation_gathers_uneven_groups_by_index(monkeypatch):
    monkeypatch.setattr(moe, "gathering_moves_less", lambda *_: False)
    arrays = _arrays()

    def evaluation(layer):
        def fn(theta, batch):
            y_BLM, _ = layer.FProp(theta, batch.x_BLM, batch.valid_BL, Context(Mode.EVAL))
            return NestedMap(y_BLM=y_BLM)

        return fn

    one = _params(group_size=32).Instantiate(building.Unannotated(), "moe")
    theta = building.random_theta(one)
    want = building.run_eagerly(evaluation(one), theta=theta, batch=arrays)

    params = _params(group_size=32, dispatch=Dispatch.GATHER)
    layer = params.Instantiate(Annotator(functions.partitioning(2)), "moe")
    args = {"theta": building.theta_specs(layer), "batch": _SPECS}
    program = building.compile_fn(evaluation(layer), 2, {"y_BLM": "BLM"}, **args)
    got = program(theta, arrays)
    np.testing.assert_allclose(got.y_BLM, want.y_BLM, rtol=1e-5, atol=1e-6)
