"""Partial results: fewer sums over the devices, but the same numbers."""

import importlib.util

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.partial import Partial
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.mesh import Mesh

_K = {"even": 24, "uneven": 21}


def _parts(num_partitions):
    return Partitioning.from_dict(Mesh.flat(num_partitions), {"K": "d"})


def _arguments(k):
    return NestedMap(
        u_AK=functions.f32((6, k), "__"),
        v_KB=functions.f32((k, 10), "__"),
        w_BC=functions.f32((10, 3), "__"),
        x_AK=functions.f32((6, k), "__"),
        y_KB=functions.f32((k, 10), "__"),
    )


def _late(parts, batch):
    """Y = U V W, then the sum of two products, each summed over the devices once."""
    uv = Partial.from_einsum(parts, "AK,KB->AB", batch.u_AK, batch.v_KB, letter="K")
    xy = Partial.from_einsum(parts, "AK,KB->AB", batch.x_AK, batch.y_KB, letter="K")
    return NestedMap(
        chain_AC=uv.einsum("AB,BC->AC", batch.w_BC).reduce(), sum_AB=(uv + xy).reduce()
    )


def _eager(parts, batch):
    annotate = Annotator(parts).annotate

    def product(a, b):
        product = tf.einsum("AK,KB->AB", annotate(a, "AK"), annotate(b, "KB"))
        return annotate(product, "AB")

    uv_AB, xy_AB = product(batch.u_AK, batch.v_KB), product(batch.x_AK, batch.y_KB)
    return NestedMap(chain_AC=uv_AB @ batch.w_BC, sum_AB=uv_AB + xy_AB)


def _exported(how, parts, k, results):
    """Exports only the named results of `how`, or also their gradients."""

    def fn(batch):
        if results != "gradients":
            return NestedMap(y=how(parts, batch)[results])
        with tf.GradientTape() as tape:
            leaves = batch.Flatten()
            tape.watch(leaves)
            y = how(parts, batch)
            loss = tf.reduce_sum(y.chain_AC**2) + tf.reduce_sum(tf.sin(y.sum_AB))
        return NestedMap(y=y, d=batch.Pack(tape.gradient(loss, leaves)))

    return lowering.export(AnnotatedFn("partial", fn, ("batch",), (_arguments(k),)), parts)


def _whole(parts, batch):
    uv = batch.u_AK @ batch.v_KB
    return NestedMap(chain_AC=uv @ batch.w_BC, sum_AB=uv + batch.x_AK @ batch.y_KB)


@pytest.mark.parametrize("num_partitions", [1, 8])
@pytest.mark.parametrize("k", _K)
def test_late_sums_are_right_with_their_gradients(k, num_partitions):
    batch = functions.randoms(_arguments(_K[k]), 1)
    exported = _exported(_late, _parts(num_partitions), _K[k], "gradients")
    got = compile_program(exported)(batch)
    tensors = batch.Transform(tf.constant)
    with tf.GradientTape() as tape:
        tape.watch(tensors.Flatten())
        y = _whole(None, tensors)
        loss = tf.reduce_sum(y.chain_AC**2) + tf.reduce_sum(tf.sin(y.sum_AB))
    want = NestedMap(y=y, d=batch.Pack(tape.gradient(loss, tensors.Flatten())))
    for (path, a), b in zip(got.FlattenItems(), want.Flatten(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3, err_msg=path)


def _all_reduced_bytes(how, results, compile=compile_program):
    """Returns the bytes of each all-reduce, the program's only kind of collective."""
    report = compile(_exported(how, _parts(8), _K["even"], results)).report()
    assert sum(count for _, count in report.collectives) == report.count("all-reduce")
    return [collective.result_bytes for collective in report.collective_ops]


_ONE_SUM = 4 * 6 * 10


def test_two_products_are_added_over_the_devices_once():
    assert _all_reduced_bytes(_late, "sum_AB") == [_ONE_SUM]
    # XLA may send two sums together, so only the bytes count.
    assert sum(_all_reduced_bytes(_eager, "sum_AB")) == 2 * _ONE_SUM


def test_a_chain_of_products_is_added_at_its_end():
    assert _all_reduced_bytes(_late, "chain_AC") == [4 * 6 * 3]
    assert _all_reduced_bytes(_eager, "chain_AC") == [_ONE_SUM]


def _projections(parts, batch):
    """The gradient of x for three products with column-split weights, like q, k and v."""
    annotate = Annotator(parts).annotate
    x_AB = batch.u_AK @ batch.v_KB
    with tf.GradientTape() as tape:
        tape.watch(x_AB)
        weights = (tf.transpose(batch.y_KB) * scale for scale in (1.0, 2.0, 3.0))
        outputs = [annotate(annotate(x_AB, "AB") @ annotate(w, "BK"), "AK") for w in weights]
        loss = tf.add_n([tf.reduce_sum(tf.sin(output)) for output in outputs])
    return NestedMap(d_x_AB=annotate(tape.gradient(loss, x_AB), "AB"))


@pytest.mark.slow
def test_a_tpu_adds_the_terms_of_a_sum_itself_but_not_after_a_product():
    def compile(program):
        return topology_executable.compile_program(program, "v3:2x2")

    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ValueError, match="the TPU compiler is not installed"):
            _all_reduced_bytes(_eager, "sum_AB", compile)
        return
    assert _all_reduced_bytes(_eager, "sum_AB", compile) == [_ONE_SUM]
    in_bfloat16 = 2 * 6 * 10  # The dtype in which the next product reads it.
    assert _all_reduced_bytes(_eager, "chain_AC", compile) == [in_bfloat16]
    assert _all_reduced_bytes(_late, "chain_AC", compile) == [4 * 6 * 3]
    assert sum(_all_reduced_bytes(_projections, "d_x_AB")) == 3 * _ONE_SUM
    assert _all_reduced_bytes(_projections, "d_x_AB", compile) == [_ONE_SUM]


def test_other_dims_stay_split_over_other_axes():
    """U's rows are split over x, the contracted dim over y: terms and sum stay split over x."""
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 4)), {"A": "x", "K": "y"})
    args = NestedMap(u_AK=functions.f32((6, 24), "AK"), v_KB=functions.f32((24, 10), "KB"))

    def fn(batch):
        product = Partial.from_einsum(parts, "AK,KB->AB", batch.u_AK, batch.v_KB, letter="K")
        return NestedMap(y_AB=product.reduce())

    made = AnnotatedFn("rows", fn, ("batch",), (args,), {"y_AB": "AB"})
    executable = compile_program(lowering.export(made, parts))
    batch = functions.randoms(args, 2)
    y_AB = executable(batch).y_AB
    np.testing.assert_allclose(y_AB, batch.u_AK @ batch.v_KB, rtol=1e-4, atol=1e-4)
    assert y_AB.addressable_shards[0].data.shape == (3, 10)
    (sent,) = executable.report().collective_ops
    assert (sent.kind, sent.result_bytes) == ("all-reduce", 4 * 3 * 10)
    assert sent.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_sum_along_two_axes_a_whole_tensor_and_a_scaling():
    """U V over both axes, plus W, each row scaled: one all-reduce over all 8 partitions."""
    parts = Partitioning.from_dict(Mesh(("x", "y"), (2, 4)), {"K": ("x", "y")})
    args = NestedMap(
        u_AK=functions.f32((6, 21), "__"),
        v_KB=functions.f32((21, 10), "__"),
        w_AB=functions.f32((6, 10), "__"),
    )

    def fn(batch):
        uv_AB = Partial.from_einsum(parts, "AK,KB->AB", batch.u_AK, batch.v_KB, letter="K")
        w_AB = Partial.from_whole(parts, batch.w_AB, "AB", ("x", "y"))
        return NestedMap(y_AB=(uv_AB + w_AB).einsum("AB,A->AB", tf.range(6.0)).reduce())

    compiled = compile_program(lowering.export(AnnotatedFn("sum", fn, ("batch",), (args,)), parts))
    batch = functions.randoms(args, 3)
    want = (batch.u_AK @ batch.v_KB + batch.w_AB) * np.arange(6.0)[:, None]
    np.testing.assert_allclose(compiled(batch).y_AB, want, rtol=1e-4, atol=1e-4)
    (sent,) = compiled.report().collective_ops
    assert (sent.kind, sent.result_bytes, sent.group_size) == ("all-reduce", _ONE_SUM, 8)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda p: _ab(p, equation="AK,KB"), "Partial.from_einsum: expected an equation like"),
        (lambda p: _ab(p, equation="AK->AK"), "expected an equation like 'BH,HM->BM'"),
        (lambda p: _ab(p, letter="A"), "'AK,KB->AB' does not contract 'A'"),
        (lambda p: _ab(_parts(1), "AB,BK->AK", "B"), r"table {'K': 'd'} does not split 'B'"),
        (
            lambda p: _ab(p).einsum("BA,AC->BC", tf.zeros([2, 2])),
            "Partial.einsum: 'BA,AC->BC' begins with 'BA', but the partial result has dims 'AB'",
        ),
        (
            lambda p: Partial.from_whole(p, tf.zeros([4]), "AB", "d"),
            "Partial.from_whole: .* has shape \\(4,\\), rank 1, but dims 'AB' name 2",
        ),
        (
            lambda p: Partial.from_terms(p, tf.zeros([3, 4, 4]), "AB", "d"),
            "has shape \\(3, 4, 4\\); expected 2 terms, one for each partition along 'd'",
        ),
        (lambda p: _ab(p).reduce(split="C"), "Partial.reduce: 'AB' has no dim 'C' to split"),
        (
            lambda p: _ab(p) + _ab(p, "AK,KB->BA"),
            "'AB' over axis 'd' can't be added to 'BA' over axis 'd'",
        ),
    ],
)
def test_invalid_arguments_are_refused(use, message):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=message):
        use(_parts(2))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([6, 21], r"'AK,KB->AB': 'K' is of sizes \[21, 24\]"),  # Both have 3 on each of 8 devices.
        ([6, 4, 6], r"u_AK:0 has shape \(6, 4, 6\); a static shape of dims 'AK' is expected"),
        ([None, 24], r"u_AK:0 has shape \(None, 24\); a static shape of dims 'AK' is expected"),
    ],
)
def test_operands_that_do_not_fit_are_refused(shape, message):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=message):
        u_AK = tf.compat.v1.placeholder(tf.float32, shape, name="u_AK")
        Partial.from_einsum(_parts(8), "AK,KB->AB", u_AK, tf.zeros([24, 10]), letter="K")


def _ab(parts, equation="AK,KB->AB", letter="K"):
    return Partial.from_einsum(parts, equation, tf.zeros([4, 4]), tf.zeros([4, 4]), letter=letter)
