"""The MoE layer: partitioned equals unpartitioned, in two all-to-alls each way."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import moe
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.feed_forward import FeedForwardLayer
from lingvo_gshard.layers.gating import CapacityBy
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.layers import building
from tests.spmd import functions

B, L, M, H, E, S = 16, 6, 5, 7, 8, 12
_SEED = np.array([3, 4], np.int32)


def _params(**changes):
    p = MoELayer.Params().Set(dim=M, hidden_dim=H, num_experts=E, group_size=S)
    return p.Set(**changes)


def _arrays():
    rng = np.random.default_rng(7)
    x_BLM = rng.standard_normal((B, L, M)).astype("float32")
    real_BL = (rng.random((B, L)) < 0.8).astype("float32")
    out_BLM = rng.standard_normal((B, L, M)).astype("float32")
    return NestedMap(x_BLM=x_BLM, real_BL=real_BL, out_BLM=out_BLM, seed=_SEED)


_SPECS = NestedMap(
    x_BLM=functions.f32((B, L, M), "BLM"),
    real_BL=functions.f32((B, L), "BL"),
    out_BLM=functions.f32((B, L, M), "BLM"),
    seed=TensorSpec((2,), "int32", "_"),
)


_COUNTS = [pytest.param(n, marks=[pytest.mark.slow] if n in (4, 8) else []) for n in (2, 4, 8)]


def _forward(layer):
    def fn(theta, batch):
        context = Context(Mode.TRAIN, batch.seed)
        y_BLM, routing = layer.FProp(theta, batch.x_BLM, batch.real_BL, context)
        return NestedMap(y_BLM=y_BLM, routing=NestedMap(vars(routing)))

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


@pytest.fixture(scope="module")
def trained():
    """Executable and results of a forward and backward pass, by partitions and dispatch."""

    @functools.cache
    def compiled_and_run(num_partitions, dispatch=Dispatch.EINSUM):
        parts = functions.partitioning(num_partitions)
        layer = _params(dispatch=dispatch).Instantiate(Annotator(parts), "moe")
        specs = building.theta_specs(layer)
        dims = {f"d_theta.{path}": spec.dims for path, spec in specs.FlattenItems()}
        dims |= {"y_BLM": "BLM", "d_x_BLM": "BLM"}
        executable = building.compile_fn(
            _forward_backward(layer), num_partitions, dims, theta=specs, batch=_SPECS
        )
        return executable, executable(building.random_theta(layer), _arrays())

    return compiled_and_run


def _check_equal(got, want):
    assert got.IsCompatible(want)
    for (path, a), b in zip(got.FlattenItems(), want.Flatten(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path)


def test_no_result_is_trivial(trained):
    for path, array in trained(1)[1].FlattenItems():
        assert np.abs(array).max() > 0 or path == "routing.idle_experts", path


def test_both_ways_of_dispatch_are_equal(trained):
    _check_equal(trained(1, Dispatch.GATHER)[1], trained(1)[1])


@pytest.mark.parametrize("dispatch", Dispatch)
@pytest.mark.parametrize("num_partitions", _COUNTS)
def test_partitioned_equals_unpartitioned(trained, num_partitions, dispatch):
    _check_equal(trained(num_partitions, dispatch)[1], trained(1)[1])


@pytest.mark.parametrize("dispatch", Dispatch)
@pytest.mark.parametrize("num_partitions", _COUNTS)
def test_forward_and_backward_are_four_all_to_alls(trained, num_partitions, dispatch):
    assert _collectives(trained(num_partitions, dispatch)[0]) == (4, 0)


@pytest.mark.parametrize("dispatch", Dispatch)
@pytest.mark.parametrize("num_partitions", _COUNTS)
def test_forward_is_two_all_to_alls(num_partitions, dispatch):
    layer = _params(dispatch=dispatch).Instantiate(
        Annotator(functions.partitioning(num_partitions)), "moe"
    )
    executable = building.compile_fn(
        _forward(layer),
        num_partitions,
        {"y_BLM": "BLM"},
        theta=building.theta_specs(layer),
        batch=_SPECS,
    )
    assert _collectives(executable) == (2, 0)


def _collectives(executable):
    report = executable.report()
    return report.count("all-to-all"), report.count("all-gather")


# Four experts; on fewer, as many and more devices. Groups are always as many or more.
_EXPERTS_X_DATA = Partitioning.from_dict(
    Mesh(("r", "d"), (2, 4)), {"B": ("r", "d"), "G": ("r", "d"), "E": "d"}
)


@functools.cache
def _four_experts(parts, dispatch):
    layer = _params(num_experts=4, dispatch=dispatch).Instantiate(Annotator(parts), "moe")
    specs = building.theta_specs(layer)
    dims = {f"d_theta.{path}": spec.dims for path, spec in specs.FlattenItems()}
    annotated = AnnotatedFn(
        "moe",
        _forward_backward(layer),
        ("theta", "batch"),
        (specs, _SPECS),
        dims | {"y_BLM": "BLM", "d_x_BLM": "BLM"},
    )
    executable = compile_program(lowering.export(annotated, parts))
    return executable, executable(building.random_theta(layer), _arrays())


@pytest.mark.parametrize(
    ("parts", "dispatch"),
    [
        (_EXPERTS_X_DATA, Dispatch.EINSUM),
        pytest.param(_EXPERTS_X_DATA, Dispatch.GATHER, marks=pytest.mark.slow),
        pytest.param(functions.partitioning(4), Dispatch.EINSUM, marks=pytest.mark.slow),
        pytest.param(functions.partitioning(2), Dispatch.GATHER, marks=pytest.mark.slow),
    ],
)
def test_fewer_experts_than_devices_as_many_and_more(parts, dispatch):
    executable, got = _four_experts(parts, dispatch)
    _check_equal(got, _four_experts(functions.partitioning(1), Dispatch.EINSUM)[1])
    assert _collectives(executable) == (4, 0)
    assert got.d_theta.wi.addressable_shards[0].data.shape == (4 // parts.factor("E")[0], M, H)


def test_every_device_holds_its_experts_alone(trained):
    d_theta = trained(2)[1].d_theta
    assert d_theta.wi.addressable_shards[0].data.shape == (E // 2, M, H)
    assert d_theta.wg.addressable_shards[0].data.shape == (M, E)


def _eager(params, theta, x_BLM, real_BL, mode=Mode.EVAL):
    layer = params.Instantiate(building.Unannotated(), "moe")
    y_BLM, routing = layer.FProp(theta, tf.constant(x_BLM), tf.constant(real_BL), Context(mode))
    return y_BLM.numpy(), routing


def test_experts_that_hold_the_dense_weights_equal_the_dense_layer():
    dense = FeedForwardLayer.Params().Set(dim=M, hidden_dim=H)
    dense = dense.Instantiate(building.Unannotated(), "dense")
    theta = building.random_theta(dense)
    experts = NestedMap(
        wg=np.random.default_rng(3).standard_normal((M, E)).astype("float32"),
        wi=np.tile(theta.wi, (E, 1, 1)),
        wo=np.tile(theta.wo, (E, 1, 1)),
    )
    x_BLM = _arrays().x_BLM
    got, routing = _eager(_params(), experts, x_BLM, np.ones((B, L), "float32"))
    want = dense.FProp(theta, tf.constant(x_BLM), Context(Mode.EVAL)).numpy()
    by_hand = np.maximum(x_BLM @ theta.wi, 0) @ theta.wo
    np.testing.assert_allclose(want, by_hand, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert routing.overflow == 0


def test_each_token_gets_its_two_experts_mixed_by_their_gates():
    layer = _params().Instantiate(building.Unannotated(), "moe")
    theta, arrays = building.random_theta(layer), _arrays()
    got, _ = _eager(_params(), theta, arrays.x_BLM, arrays.real_BL)
    for b, i in np.ndindex(B, L):
        x, want = arrays.x_BLM[b, i], np.zeros(M)
        gates = np.exp(x @ theta.wg)
        chosen = np.argsort(-gates)[:2] if arrays.real_BL[b, i] else []
        for e in chosen:
            weight = gates[e] / gates[chosen].sum()
            want += weight * np.maximum(x @ theta.wi[e], 0) @ theta.wo[e]
        np.testing.assert_allclose(got[b, i], want, rtol=1e-4, atol=1e-5)


def test_padding_is_zero_and_changes_nothing_for_the_others(trained):
    layer = _params().Instantiate(Annotator(functions.partitioning(1)), "moe")
    arrays = _arrays()
    noise = np.random.default_rng(8).standard_normal((B, L, M)).astype("float32") * 9
    arrays.x_BLM = np.where(arrays.real_BL[..., None] > 0, arrays.x_BLM, noise)
    got = trained(1)[0](building.random_theta(layer), arrays)
    want = trained(1)[1]
    np.testing.assert_array_equal(got.y_BLM, want.y_BLM)
    np.testing.assert_allclose(got.routing.aux_loss, want.routing.aux_loss, rtol=1e-6)
    assert not np.asarray(want.y_BLM)[arrays.real_BL == 0].any()


def test_training_drops_tokens_by_capacity_and_evaluation_none(trained):
    arrays = _arrays()
    theta = building.random_theta(_params().Instantiate(building.Unannotated(), "moe"))
    # Every token prefers expert 0, then expert 1, which has no random luck: g2 = 1/2.
    theta.wg[:] = 0
    got = trained(1)[0](theta, arrays)
    capacity, real_GS = 2 * S // E, arrays.real_BL.reshape(-1, S)
    dropped = np.maximum(real_GS.sum(1) - capacity, 0).sum()
    np.testing.assert_allclose(got.routing.overflow, dropped / real_GS.sum(), rtol=1e-6)
    np.testing.assert_allclose(got.routing.load_E, [E / 2, E / 2] + [0] * (E - 2))
    assert _eager(_params(), theta, arrays.x_BLM, arrays.real_BL)[1].overflow == 0


@pytest.mark.parametrize("dispatch", Dispatch)
def test_decoding_routes_each_example_by_itself(dispatch):
    theta = building.random_theta(_params().Instantiate(building.Unannotated(), "moe"))
    arrays = _arrays()
    params = _params(dispatch=dispatch, **{"eval_capacity.by": CapacityBy.FACTOR})
    both, _ = _eager(params, theta, arrays.x_BLM, arrays.real_BL, Mode.DECODE)
    alone, _ = _eager(params, theta, arrays.x_BLM[3:4], arrays.real_BL[3:4], Mode.DECODE)
    np.testing.assert_allclose(both[3:4], alone, rtol=1e-5, atol=1e-6)


def test_a_group_size_that_does_not_divide_is_refused():
    with pytest.raises(
        ValueError, match=r"moe: group_size 7 does not divide .* 96 tokens \(16 x 6\)"
    ):
        _eager(_params(group_size=7), NestedMap(), _arrays().x_BLM, _arrays().real_BL)


def test_groups_that_indices_cannot_deal_to_the_partitions_are_refused():
    parts = functions.partitioning(2)
    layer = _params(group_size=32, dispatch=Dispatch.GATHER).Instantiate(Annotator(parts), "moe")
    args = (building.theta_specs(layer), _SPECS)
    annotated = AnnotatedFn("moe", _forward(layer), ("theta", "batch"), args, {"y_BLM": "BLM"})
    with pytest.raises(ValueError, match=r"moe: dispatch GATHER .* 3 groups .* 2 partitions"):
        lowering.export(annotated, parts)


@pytest.mark.parametrize(
    ("hidden_dim", "num_experts", "tokens", "want"),
    [
        (8192, 128, 2**20, 512),  # At most 8192 / 10, and a divisor.
        (8192, 2048, 2**22, 1024),  # In a group of 512 half of the experts' places stay empty.
        (8192, 128, 3 * 2**18, 768),
        (8192, 128, 100, 100),
        (7, 8, 96, 4),
        (7, 2, 97, 1),
    ],
)
def test_groups_are_by_default_small_enough_for_cheap_dispatch(
    hidden_dim, num_experts, tokens, want
):
    p = _params(hidden_dim=hidden_dim, num_experts=num_experts, group_size=None)
    assert moe.group_size(p, tokens) == want
    assert moe.group_size(p.Set(group_size=5), tokens) == 5


def test_a_layer_chooses_its_groups():
    theta = building.random_theta(_params().Instantiate(building.Unannotated(), "moe"))
    arrays = _arrays()
    got, _ = _eager(_params(group_size=None), theta, arrays.x_BLM, arrays.real_BL)
    want, _ = _eager(_params(group_size=4), theta, arrays.x_BLM, arrays.real_BL)
    np.testing.assert_array_equal(got, want)


def _losses(dispatch):
    """A function of theta and x_BLM in one tree to (sum of y * out, l_aux), and such a tree."""
    layer = _params(dispatch=dispatch).Instantiate(building.Unannotated(), "moe")
    arrays = _arrays()
    context = Context(Mode.TRAIN, tf.constant(_SEED))

    def losses(inputs):
        y_BLM, routing = layer.FProp(inputs, inputs.x_BLM, tf.constant(arrays.real_BL), context)
        return tf.reduce_sum(y_BLM * arrays.out_BLM), routing.aux_loss

    theta = building.random_theta(layer)
    return losses, NestedMap(theta, x_BLM=arrays.x_BLM).Transform(tf.constant)


@pytest.mark.parametrize("dispatch", Dispatch)
@pytest.mark.parametrize(
    ("name", "which"),
    [("wg", 0), ("wi", 0), ("wo", 0), ("x_BLM", 0), ("wg", 1), ("x_BLM", 1)],
    ids=["gate", "experts' wi", "experts' wo", "input", "aux of gate", "aux of input"],
)
def test_gradients_agree_with_finite_differences(dispatch, name, which):
    losses, inputs = _losses(dispatch)
    direction = np.random.default_rng(9).standard_normal(inputs[name].shape).astype("float32")

    def loss(step):
        return losses(NestedMap(inputs, **{name: inputs[name] + step * direction}))[which]

    with tf.GradientTape() as tape:
        step = tf.constant(0.0)
        tape.watch(step)
        value = loss(step)
    # Small enough that no token changes its experts, which would be a jump.
    width = 2e-4
    slope = (loss(width) - loss(-width)) / (2 * width)
    assert abs(slope) > 1e-4
    np.testing.assert_allclose(tape.gradient(value, step), slope, rtol=0.02)
