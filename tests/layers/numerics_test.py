"""Products of layers: values, gradients, rounded and kept tensors, and the record for a planner."""

import collections
import functools
import re

import numpy as np
import pytest
import tensorflow as tf
from jax import export

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import products
from lingvo_gshard.layers.numerics import NOTED, PLAIN, Numerics, Record, Remat, kept_by
from lingvo_gshard.layers.products import Equation
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.layers import building
from tests.spmd import functions
from tests.xla_spmd import compilers

_ROUNDED = Numerics("bfloat16")


def _normal(*shape):
    seed = sum(shape)
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)


def _with_gradients(product, x, weight):
    with tf.GradientTape() as tape:
        tape.watch([x, weight])
        y = product(x, weight)
    return [y, *tape.gradient(y, [x, weight], tf.cast(_normal(*y.shape), y.dtype))]


@pytest.mark.parametrize(
    ("equation", "x_shape", "weight_shape"),
    [
        ("BLM,MH->BLH", (2, 3, 4), (4, 7)),
        ("BLH,HM->BLM", (2, 3, 7), (7, 4)),
        ("BLM,MND->BLND", (2, 3, 5), (5, 4, 6)),
        ("BLND,NDM->BLM", (2, 3, 4, 6), (4, 6, 5)),
        ("EGCM,EMH->EGCH", (2, 5, 3, 4), (2, 4, 7)),
        ("EGCH,EHM->EGCM", (2, 5, 3, 7), (2, 7, 4)),
    ],
)
def test_values_and_gradients_equal_einsum(equation, x_shape, weight_shape):
    x, weight = _normal(*x_shape), _normal(*weight_shape)
    expected = _with_einsum(equation, x, weight)
    results = _with_gradients(functools.partial(PLAIN.einsum, equation), x, weight)
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "shape"),
    [
        ("BLM,HM->BLH", [2, 2]),  # The weight is transposed.
        ("BLM,MH->LBH", [2, 2]),
        ("E(GC)H,EHM->EGCM", [2, 2]),  # Its rows are merged in x alone.
        ("EGCM,EMND->EGCND", [2, 2]),
        ("GESC,GSM->EGCM", [2, 2, 2]),
        ("BNLD,BNTD->BNL", [2, 2, 2]),
    ],
)
def test_a_product_of_another_form_than_rows_and_weight_is_refused(equation, shape):
    message = f"^einsum: expected rows .*got '{re.escape(equation)}'"
    with pytest.raises(ValueError, match=message):
        PLAIN.einsum(equation, _normal(2, 2, 2), _normal(*shape))


def test_rows_may_be_merged():
    x_EGCM, wi_EMH, wo_EHM = _normal(2, 5, 3, 4), _normal(2, 4, 7), _normal(2, 7, 4)
    kept = []
    record = Record()
    numerics = Numerics(remat=Remat.ALL_BUT_PRODUCTS, record=record).keeping(kept)
    h_EGH = numerics.einsum("EGCM,EMH->E(GC)H", x_EGCM, wi_EMH)
    y_EGM = PLAIN.einsum("E(GC)H,EHM->E(GC)M", h_EGH, wo_EHM)

    def to_groups(y_EGM):
        return tf.transpose(tf.reshape(y_EGM, [2, 5, 3, 4]), [1, 0, 2, 3])

    y_GECM = numerics.einsum("E(GC)H,EHM->GECM", h_EGH, wo_EHM, transpose=to_groups)
    want_EGCH = tf.einsum("EGCM,EMH->EGCH", x_EGCM, wi_EMH)
    want_EGCM = tf.einsum("EGCH,EHM->EGCM", want_EGCH, wo_EHM)
    np.testing.assert_allclose(h_EGH, tf.reshape(want_EGCH, [2, 15, 7]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y_EGM, tf.reshape(want_EGCM, [2, 15, 4]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y_GECM, to_groups(want_EGCM), rtol=1e-5, atol=1e-5)

    # They are annotated as the first dim is. A planner sees all dims.
    assert [dims for dims, _ in kept] == ["EGH", "GECM"]
    assert [product.equation for product in record.products] == ["EGCM,EMH->EGCH", "EGCH,EHM->GECM"]
    for product in record.products:
        assert product.sizes == {"E": 2, "G": 5, "C": 3, "M": 4, "H": 7}


def test_products_have_dtype_of_rows():
    x = tf.cast(_normal(2, 3, 7), tf.bfloat16)
    y, d_x, d_weight = _with_gradients(
        functools.partial(PLAIN.einsum, "BLH,HM->BLM"), x, _normal(7, 4)
    )
    assert (y.dtype, d_x.dtype, d_weight.dtype) == (tf.bfloat16, tf.bfloat16, tf.float32)


@pytest.mark.parametrize(("depth", "width"), [(4, 7), (7, 4)])
def test_weight_gradient_transposes_narrower_factor(depth, width):
    def fn(args):
        project = functools.partial(PLAIN.einsum, "BM,MH->BH")
        _, _, d_weight = _with_gradients(project, args.x, args.weight)
        return NestedMap(d_weight=d_weight)

    shapes = NestedMap(x=(3, depth), weight=(depth, width))
    specs = shapes.Transform(lambda shape: TensorSpec(shape, "float32", "__"))
    text = building.compile_fn(fn, 1, args=specs).compiled.as_text()
    dots = re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(", text)
    assert dots == [(str(min(depth, width)), str(max(depth, width)))]


def _in_16_bits(x):
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)


# Which of a product's tensors are inside a layer: its result, or the gradients to its factors.
_ROUNDED_TENSORS = [
    ("BLM,MH->BLH", (2, 3, 4), (4, 8), {"y"}),
    ("BLH,HM->BLM", (2, 3, 8), (8, 4), {"d_a"}),
    ("BLM,MND->BLND", (2, 3, 4), (4, 6, 5), {"y"}),
    ("BLND,NDM->BLM", (2, 3, 4, 6), (4, 6, 5), {"d_a"}),
    ("BNLD,BNTD->BNLT", (2, 3, 4, 6), (2, 3, 8, 6), {"d_a", "d_b"}),
    ("BNLT,BNTD->BNLD", (2, 3, 4, 6), (2, 3, 6, 8), {"y", "d_b"}),
    ("GSEC,GSM->EGCM", (2, 3, 4, 6), (2, 3, 8), {"y"}),
    ("EGCM,EMH->EGCH", (2, 3, 5, 4), (2, 4, 7), {"y", "d_a"}),
    ("EGCH,EHM->EGCM", (2, 3, 5, 8), (2, 8, 4), {"y", "d_a"}),
    ("GSEC,GECM->GSM", (2, 3, 4, 6), (2, 4, 6, 8), {"d_b"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("has_bfloat16_results", [True, False])
def test_bfloat16_rounds_each_factor_and_the_inside_of_a_layer(monkeypatch, has_bfloat16_results):
    """An older XLA lacks products with bfloat16 results."""
    monkeypatch.setattr(products, "_has_bfloat16_results", lambda: has_bfloat16_results)
    factors = {
        f"product_{i}": NestedMap(a=_normal(*a_shape), b=_normal(*b_shape))
        for i, (_, a_shape, b_shape, _) in enumerate(_ROUNDED_TENSORS)
    }
    factors = NestedMap(factors)

    def fn(args):
        results = NestedMap()
        for name, (equation, *_) in zip(factors, _ROUNDED_TENSORS, strict=True):
            product = functools.partial(_ROUNDED.einsum, equation)
            y, d_a, d_b = _with_gradients(product, args[name].a, args[name].b)
            results[name] = NestedMap(y=y, d_a=d_a, d_b=d_b)
        return results

    specs = factors.Transform(lambda x: functions.f32(tuple(x.shape), "_" * x.shape.rank))
    program = building.export_fn(fn, 1, args=specs)
    text = export.deserialize(bytearray(program.exported)).mlir_module()
    dtypes = re.findall(r"stablehlo.dot.*-> tensor<[^>]*x(\w+)>", text)
    assert len(dtypes) == 3 * len(_ROUNDED_TENSORS)
    num_inside = sum(len(inside) for *_, inside in _ROUNDED_TENSORS)
    assert dtypes.count("bf16") == (num_inside if has_bfloat16_results else 0)

    results = compile_program(program)(factors.Transform(lambda x: x.numpy()))
    for name, (equation, _, _, inside) in zip(factors, _ROUNDED_TENSORS, strict=True):
        _check_rounded(results[name], equation, factors[name].a, factors[name].b, inside)


def _check_rounded(result, equation, a, b, inside):
    """Compares a product and its gradients with the product and gradients of rounded factors."""
    d_y = _in_16_bits(_normal(*result.y.shape))
    a16, b16 = _in_16_bits(a), _in_16_bits(b)
    with tf.GradientTape() as tape:
        tape.watch([a16, b16])
        y = tf.einsum(equation, a16, b16)
    wanted = [y, *tape.gradient(y, [a16, b16], d_y)]

    names = ("y", "d_a", "d_b")
    for name, want, wide in zip(names, wanted, _with_einsum(equation, a, b), strict=True):
        got = np.asarray(result[name])
        assert got.dtype == np.float32
        # The compiler may keep the digits of a rounded result, but not lose more of them.
        rtol = 2**-8 if name in inside else 1e-5
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5, err_msg=f"{equation} {name}")
        assert 1e-4 < np.linalg.norm(got - wide) / np.linalg.norm(wide) < 2**-6


def test_a_step_of_decoding_rounds_no_queries_nor_caches():
    q_BNLD, k_BNTD = _normal(2, 3, 1, 6), _normal(2, 3, 8, 6)
    decoding = Numerics("bfloat16", is_decoding=True)
    got = decoding.einsum("BNLD,BNTD->BNLT", q_BNLD, k_BNTD)
    np.testing.assert_array_equal(got, PLAIN.einsum("BNLD,BNTD->BNLT", q_BNLD, k_BNTD))


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_a_router_is_exact_and_logits_are_wide(dtype):
    x, w = tf.cast(_normal(2, 3, 4), dtype), _normal(4, 7)
    logits = _ROUNDED.einsum("GSM,ME->GSE", x, w, exact=True)
    want = tf.einsum("GSM,ME->GSE", tf.cast(x, tf.float32), w)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)

    # The sums of a product of 16-bit factors stay float32. Only XLA has such products.
    @tf.function(jit_compile=True, autograph=False)
    def wide():
        return PLAIN.einsum("BLM,MV->BLV", x, w, wide=True)

    assert wide().dtype == tf.float32


_X, _W = tf.constant([[1.0, 2.0]]), tf.constant([[3.0], [4.0]])


def _numerics(remat, hidden_dtype=None):
    return Numerics(remat=remat, hidden_dtype=hidden_dtype)


def test_kept_results_equal_computed_ones_in_order():
    kept = []
    numerics = _numerics(Remat.ALL_BUT_PRODUCTS).keeping(kept)
    for equation, left, right in [("BM,MH->BH", _X, _W), ("BH,HM->BM", _X, _W)]:
        got = numerics.einsum(equation, left, right)
        np.testing.assert_array_equal(got, PLAIN.einsum(equation, left, right))
    assert [dims for dims, _ in kept] == ["BH", "BM"]
    assert [tensor.numpy().tolist() for _, tensor in kept] == [[[11.0]], [[11.0]]]


def test_replayed_result_has_kept_value_and_product_gradients():
    values = [tf.constant([[7.0]]), tf.constant([[8.0]], tf.bfloat16)]
    numerics = _numerics(Remat.ALL_BUT_PRODUCTS).replaying(values)
    with tf.GradientTape() as tape:
        tape.watch([_X, _W])
        first, second = (numerics.einsum("BM,MH->BH", _X, _W) for _ in range(2))
        both = first + 10.0 * second
    assert both.numpy().tolist() == [[87.0]]
    d_x, d_w = tape.gradient(both, [_X, _W])
    np.testing.assert_array_equal(d_x, 11.0 * tf.transpose(_W))
    np.testing.assert_array_equal(d_w, 11.0 * tf.transpose(_X))


@pytest.mark.parametrize(
    ("equation", "want"),
    [
        ("GSM,ME->GSE", Remat.NONE),
        ("GSEC,GSM->EGCM", Remat.ALL_BUT_PRODUCTS),
        ("EGCM,EMH->EGCH", Remat.ALL_BUT_PRODUCTS),
        ("BLM,MND->BLND", Remat.ALL_BUT_PROJECTIONS),
        ("BNLD,BNTD->BNLT", Remat.NONE),
        ("BLND,NDM->BLM", Remat.ALL_BUT_PRODUCTS),
    ],
)
def test_letters_decide_which_results_are_kept(equation, want):
    assert kept_by(Equation.parse(equation)) is want


def test_inner_results_may_be_kept_in_16_bits():
    kept = []
    numerics = _numerics(Remat.ALL_BUT_PROJECTIONS, "bfloat16").keeping(kept)
    numerics.einsum("BM,MH->BH", _X, _W)
    numerics.einsum("BH,HM->BM", _X, _W)
    numerics.once("GS", tf.constant([[3]]))
    dtypes = [(dims, tensor.dtype) for dims, tensor in kept]
    assert dtypes == [("BH", tf.bfloat16), ("BM", tf.float32), ("GS", tf.int32)]

    again = numerics.replaying(tensor for _, tensor in kept)
    assert again.einsum("BM,MH->BH", _X, _W).dtype == tf.float32
    again.einsum("BH,HM->BM", _X, _W)
    assert again.once("GS", tf.constant([[5]])).numpy().tolist() == [[3]]

    # Others choose again.
    numerics = _numerics(Remat.ALL_BUT_PRODUCTS).keeping(kept := [])
    numerics.once("GS", tf.constant([[3]]))
    assert not kept


def test_a_record_has_products_with_sizes_scopes_and_times():
    record = Record()
    numerics = Numerics(record=record, remat=Remat.BLOCK)
    x_BLM, w_MH = _normal(2, 3, 4), _normal(4, 7)
    table = _normal(9, 4)

    @tf.function(autograph=False)
    def traced():
        with tf.name_scope("embedding/"):
            ids = tf.constant([[1, 2]])
            numerics.lookup("BLV,VM->BLM", tf.gather(table, ids), V=9)
        with tf.name_scope("encoder/layers_1/"):
            inside = numerics.in_loop(2).in_loop(5)
            inside.einsum("BLM,MH->BLH", x_BLM, w_MH)
            inside.einsum("BLM,MH->BLH", x_BLM, w_MH)
        numerics.unrecorded().einsum("BLM,MH->BLH", x_BLM, w_MH)
        numerics.replaying([]).einsum("BLM,MH->BLH", x_BLM, w_MH)
        return x_BLM

    graph = traced.get_concrete_function().graph
    lookup, first, second = record.products
    assert (lookup.equation, lookup.is_lookup) == ("BLV,VM->BLM", True)
    assert lookup.sizes == {"B": 1, "L": 2, "V": 9, "M": 4}
    assert (lookup.scope, lookup.times) == ("embedding", 1)
    assert first.equation == "BLM,MH->BLH"
    assert first.sizes == {"B": 2, "L": 3, "M": 4, "H": 7}
    assert (first.scope, first.times, first.is_lookup) == ("encoder/layers_1", 10, False)
    assert first.kept_by is Remat.ALL_BUT_PRODUCTS
    assert second == first

    # Its tensors, of which the operations that computed them are found in the graph.
    assert first.left is x_BLM and first.right is w_MH
    scopes = {op.name.split("/")[2] for op in graph.get_operations() if "layers_1" in op.name}
    assert scopes == {NOTED, f"{NOTED}_1"}


def _with_einsum(equation, a, b):
    return _with_gradients(lambda a, b: tf.einsum(equation, a, b), a, b)


_EXPERTS = NestedMap(
    x=functions.f32((8, 4, 16), "GSM"),
    mask=functions.f32((8, 4, 8, 2), "GSEC"),
    wi=functions.f32((8, 16, 32), "EMH"),
    wo=functions.f32((8, 32, 16), "EHM"),
    dense=functions.f32((16, 12), "MH"),
)


def _exported_experts(numerics, num_partitions):
    """Dispatches, applies experts, combines and projects, with the gradients of all factors."""
    annotate = Annotator(functions.partitioning(num_partitions)).annotate

    def to_groups(y_EGM):
        y_EGCM = annotate(tf.reshape(y_EGM, [8, 8, 2, 16]), "EGCM")
        return tf.transpose(y_EGCM, [1, 0, 2, 3])

    def fn(args):
        leaves = args.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            x_EGCM = numerics.einsum("GSEC,GSM->EGCM", args.mask, args.x)
            x_EGCM = annotate(x_EGCM, "EGCM")
            h_EGH = numerics.einsum("EGCM,EMH->E(GC)H", x_EGCM, args.wi)
            h_EGH = annotate(tf.nn.relu(h_EGH), "EGH")
            y_GECM = numerics.einsum("E(GC)H,EHM->GECM", h_EGH, args.wo, transpose=to_groups)
            y_GECM = annotate(y_GECM, "GECM")
            y_GSM = numerics.einsum("GSEC,GECM->GSM", args.mask, y_GECM)
            y_GSM = annotate(y_GSM, "GSM")
            y_GSH = numerics.einsum("GSM,MH->GSH", y_GSM, args.dense)
            loss = tf.reduce_sum(tf.square(y_GSH))
        return NestedMap(y=y_GSH, d=args.Pack(tape.gradient(loss, leaves)))

    dims = {"y": "GSH"} | building.dims_of(d=_EXPERTS)
    annotated = AnnotatedFn("experts", fn, ("args",), (_EXPERTS,), dims)
    return lowering.export(annotated, functions.partitioning(num_partitions))


def _compiled_experts(numerics, num_partitions):
    return compile_program(_exported_experts(numerics, num_partitions))


def _collectives(run):
    names = r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\("
    return collections.Counter(re.findall(names, run.compiled.as_text()))


@pytest.mark.slow
def test_bfloat16_products_equal_on_1_2_4_and_8_partitions():
    args = functions.randoms(_EXPERTS, 1)
    runs = [_compiled_experts(_ROUNDED, count) for count in (1, 2, 4, 8)]
    want, *results = [run(args).Transform(np.asarray) for run in runs]
    for result in results:
        for (path, got), one in zip(result.FlattenItems(), want.Flatten(), strict=True):
            # Another order of a sum may round an intermediate the other way.
            error = np.linalg.norm(got - one) / np.linalg.norm(one)
            assert error < 1e-3, path
    wide = _compiled_experts(PLAIN, 8)
    assert _collectives(runs[-1]) <= _collectives(wide)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "products"),
    [
        ("v3:2x2", r"= (?:f32|bf16)\S+ convolution\(([^)]*)\)"),
        ("h100:1x8", r"= \(?(?:f32|bf16)\S+ dot\(([^)]*)\)"),
    ],
)
def test_accelerators_multiply_16_bit_numbers(machine, products):
    compilers.need(machine)
    text = topology_executable.compile_program(
        _exported_experts(_ROUNDED, 8), machine
    ).compiled.as_text()
    dtypes = dict(re.findall(r"%(\S+) = (\w+)\[", text))
    found = [re.findall(r"%([\w.-]+)", operands) for operands in re.findall(products, text)]
    assert len(found) >= 10
    assert {dtypes[name] for names in found for name in names} == {"bf16"}
