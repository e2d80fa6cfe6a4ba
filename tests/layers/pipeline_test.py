"""A pipeline of stages equals the loop over the same blocks: loss, gradients and reports.

B batch, L target length, T source length, M model.
"""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import pipeline, routing
from lingvo_gshard.layers.context import Context, Mode
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.gating import SecondExpert
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.products import dot
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.layers.transformer import Attended
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from tests.layers import building
from tests.spmd import functions
from xla_spmd.mesh import Mesh

B, L, T, M, E = 8, 6, 4, 8, 4
_DENSE = {"R": "p", "B": "d"}
_SPARSE = {"R": "p", "B": ("d", "e"), "G": ("d", "e"), "E": "e"}
_ONE = Partitioning(Mesh.flat(1), ())


def _parts(table, **axes):
    return Partitioning.from_dict(Mesh(tuple(axes), tuple(axes.values())), table)


def _params(*, sparse=False, source=False, dropout=0.0, **settings):
    p = TransformerStack.Params().Set(dim=M, num_layers=4, layers_as=Layers.LOOP)
    p.Set(**{"remat": Remat.BLOCK} | settings)

    p.layer.has_source = source
    p.layer.attention.Set(num_heads=2, head_dim=3)
    p.layer.attention.dropout.rate = p.layer.residual_dropout.rate = dropout
    p.dense.hidden_dim = 10

    if sparse:
        second = SecondExpert.RANDOM if dropout else SecondExpert.ALL
        p.moe.Set(hidden_dim=5, num_experts=E, group_size=L)
        p.moe.gating.Set(second_expert=second, z_loss_weight=1.0)
    else:
        p.moe = None
    return p


def _specs(source):
    specs = NestedMap(x=functions.f32((B, L, M), "BLM"), valid=functions.f32((B, L), "BL"))
    specs.mask = functions.f32((B, L, L), "BL_")
    if source:
        specs.encoded = functions.f32((B, T, M), "BTM")
        specs.source_mask = functions.f32((B, L, T), "BLT")
    return specs


def _inputs(source):
    inputs = functions.randoms(_specs(source), 1)
    for name in inputs.keys() & {"valid", "mask", "source_mask"}:
        inputs[name] = (inputs[name] > -0.5).astype("float32")
    return inputs


def _statistics(report):
    statistics = NestedMap(mean_square=report.mean_square)
    if report.routing:
        statistics.routing = NestedMap(routing.statistics(report.routing.by_name()))
    return statistics


def _step_of(stack):
    """The loss, reports, and gradients of the weights and inputs."""
    has_source = stack.p.layer.has_source

    def fn(theta, inputs):
        watched = NestedMap(theta=theta, x=inputs.x)
        if has_source:
            watched.encoded = inputs.encoded

        attended = Attended(
            inputs.mask, inputs.valid, inputs.get("source_mask"), inputs.get("encoded")
        )
        context = Context(Mode.TRAIN, tf.constant([3, 5]))
        with tf.GradientTape() as tape:
            tape.watch(watched.Flatten())
            y, reports = stack.FProp(theta, inputs.x, attended, context)
            loss = tf.reduce_mean(tf.square(y - 1.0))
            for report in reports:
                if report.routing:
                    loss += 10.0 * report.routing.aux_loss + report.routing.router_loss
        gradients = tape.gradient(loss, watched.Flatten(), unconnected_gradients="zero")

        return NestedMap(
            loss=loss,
            reports=[_statistics(report) for report in reports],
            gradients=watched.Pack(gradients),
        )

    return fn


@functools.cache
def _step(parts, **settings):
    """The compiled step."""
    stack = _params(**settings).Instantiate(Annotator(parts), "stack")
    theta = building.theta_specs(stack)
    specs = _specs(stack.p.layer.has_source)
    dims = building.dims_of(gradients=NestedMap(theta=theta, x=specs.x))
    return building.compile_fn(_step_of(stack), parts, dims, theta=theta, inputs=specs)


def _run(parts=None, **settings):
    """The step's results, without compilation if parts is None."""
    stack = _params(**settings).Instantiate(building.Unannotated(), "stack")
    theta = building.random_theta(stack)
    inputs = _inputs(settings.get("source", False))
    if parts is None:
        return building.run_eagerly(_step_of(stack), theta=theta, inputs=inputs)
    return _step(parts, **settings)(theta, inputs).Transform(np.asarray)


def _counts(parts, **settings):
    """The number of collectives of a kind and number of runs, by (kind, times)."""
    report = _step(parts, **settings).report()
    return collections.Counter((op.kind, op.times) for op in report.collective_ops)


@pytest.mark.slow
def test_a_pipeline_equals_the_loop():
    """Each shift, forward, again and backward, is a collective-permute in every tick."""
    parts = _parts(_DENSE, p=2, d=2)
    settings = {"num_layers": 2, "stages": 2, "microbatches": 4}
    building.assert_close(_run(parts, **settings), _run(num_layers=2))
    assert _counts(parts, **settings)["collective-permute", 4 + 2 - 1] == 3


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_16_bit_products_and_their_gradients_are_mapped(transpose_b, rounded):
    """All numbers are small integers, which bfloat16 holds."""
    rng = np.random.default_rng(4)
    a = rng.integers(-3, 4, (2, 3, 4))
    b = rng.integers(-3, 4, (2, 4, 5))

    @tf.function(autograph=False, jit_compile=True)
    def fn(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            product = functools.partial(dot, transpose_b=transpose_b, rounded=rounded)
            (y,) = pipeline._mapped(lambda a, b: [product(a, b)], [a, b])
        return y, *(tf.cast(d, tf.float32) for d in tape.gradient(y, [a, b]))

    given = b.transpose(0, 2, 1) if transpose_b else b
    y, d_a, d_b = fn(tf.cast(a, tf.bfloat16), tf.cast(given, tf.bfloat16))
    d_b = tf.linalg.matrix_transpose(d_b) if transpose_b else d_b
    np.testing.assert_array_equal(y, a @ b)
    np.testing.assert_array_equal(d_a, np.ones([2, 3, 5]) @ b.transpose(0, 2, 1))
    np.testing.assert_array_equal(d_b, a.transpose(0, 2, 1) @ np.ones([2, 3, 5]))


def test_gradients_of_mapped_16_bit_products_are_not_rounded():
    @tf.function(autograph=False, jit_compile=True)
    def fn(a, b):
        with tf.GradientTape() as tape:
            tape.watch(b)
            (y,) = pipeline._mapped(
                lambda *factors: [dot(*(tf.cast(x, tf.bfloat16) for x in factors))], [a, b]
            )
        return tape.gradient(y, b)

    rows = 257  # bfloat16 has 256 and 258.
    np.testing.assert_array_equal(fn(tf.ones([1, rows, 2]), tf.ones([1, 2, 3])), rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        (_ONE, {"stages": 2, "microbatches": 8}),
        (_parts(_DENSE, p=2, d=1), {"stages": 4, "microbatches": 2}),
        (_parts(_DENSE, p=4, d=2), {"stages": 4, "microbatches": 4}),
    ],
)
def test_every_partitioning_equals_the_loop(parts, settings):
    building.assert_close(_run(parts, source=True, **settings), _run(source=True))


@pytest.mark.slow
def test_stages_with_experts_equal_the_loop():
    """The losses, and so the weights' gradients, get nothing from the bubble's ticks.

    The two microbatches, of rows 0, 2, ... and 1, 3, ..., have different numbers of tokens.
    """
    assert len(set(_inputs(source=False).valid.reshape(-1, 2, L).sum((0, 2)))) == 2
    parts = _parts(_SPARSE, p=2, d=2, e=2)
    settings = {"stages": 2, "microbatches": 2}
    building.assert_close(_run(parts, sparse=True, **settings), _run(sparse=True))
    # In each of 3 ticks there and back: forward, again and backward.
    assert _counts(parts, sparse=True, **settings)["all-to-all", 3] == 6


def test_a_partition_holds_the_weights_of_its_stage():
    stack = _params().Instantiate(building.Unannotated())
    parts = _parts(_DENSE, p=4, d=2)
    for spec in building.theta_specs(stack).block[0].Flatten():
        assert parts.shard_shape(spec) == (1, *spec.shape[1:])


def test_the_first_microbatch_has_the_seed_of_a_batch():
    context = Context(Mode.TRAIN, tf.constant([3, 5]))
    seeds = [tuple(context.in_microbatch(tf.constant(i)).seed.numpy()) for i in range(256)]
    assert seeds[0] == (3, 5) and len(set(seeds)) == 256
    assert min(abs(int(salt) - 5) for _, salt in seeds[1:]) > 10**5  # Steps are in the salt, too.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 3}, "stages=3 needs a number of stages that divides its 4 blocks"),
        ({"stages": 0}, "stages=0 and microbatches=1: both must be 1 or more"),
        ({"microbatches": 2}, "microbatches need 2 stages or more"),
        ({"stages": 2, "layers_as": Layers.UNROLLED}, "needs layers_as=LOOP"),
        ({"stages": 2, "remat": Remat.NONE}, "needs remat=BLOCK"),
    ],
)
def test_settings_that_do_not_suit_a_pipeline_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^stack: .*{message}"):
        _params(**settings).Instantiate(building.Unannotated(), "stack")


def test_dispatch_by_gather_is_refused():
    params = _params(sparse=True, stages=2)
    params.moe.dispatch = Dispatch.GATHER
    with pytest.raises(ValueError, match="stages=2 needs moe.dispatch=EINSUM"):
        params.Instantiate(building.Unannotated())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 2}, "stages=2 is not a multiple of the 4 partitions along"),
        ({"stages": 4, "microbatches": 8}, "microbatches=8 .* 8 rows .*choose a divisor of 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _step(_parts(_DENSE, p=4, d=2), **settings)
