"""Products of rows with weights: values, gradients, and how a CPU computes the gradients."""

import collections
import functools
import re

import numpy as np
import pytest
import tensorflow as tf
from jax import export

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import products
from lingvo_gshard.layers.products import FLOAT32, Arithmetic, Rounded, result_dims
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import lowering, topology
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.layers import building
from tests.spmd import compilers, functions

_ROUNDED = Arithmetic("bfloat16")


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
    results = _with_gradients(functools.partial(FLOAT32.project, equation), x, weight)
    for got, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_rows_may_be_merged():
    x_EGCM, wi_EMH, wo_EHM = _normal(2, 5, 3, 4), _normal(2, 4, 7), _normal(2, 7, 4)
    h_EGH = FLOAT32.project("EGCM,EMH->E(GC)H", x_EGCM, wi_EMH)
    y_EGM = FLOAT32.project("E(GC)H,EHM->E(GC)M", h_EGH, wo_EHM)
    want_EGCH = tf.einsum("EGCM,EMH->EGCH", x_EGCM, wi_EMH)
    want_EGCM = tf.einsum("EGCH,EHM->EGCM", want_EGCH, wo_EHM)
    np.testing.assert_allclose(h_EGH, tf.reshape(want_EGCH, [2, 15, 7]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y_EGM, tf.reshape(want_EGCM, [2, 15, 4]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "equation",
    [
        "BLM,HM->BLH",  # The weight is transposed.
        "BML,MH->BLH",
        "BLM,MH->LBH",
        "BLM,BMH->LBH",
        "BLND,DNM->BLM",
        "E(GC)H,EHM->EGCM",  # Its rows are merged in x alone.
        "EGCM,EMND->EGCND",
        "BLM,MND->(BL)ND",
    ],
)
@pytest.mark.parametrize("arithmetic", [FLOAT32, _ROUNDED])
def test_a_product_of_another_form_than_rows_and_weight_is_refused(equation, arithmetic):
    message = f"^project: expected rows .*got '{re.escape(equation)}'"
    with pytest.raises(ValueError, match=message):
        arithmetic.project(equation, _normal(2, 2, 2), _normal(2, 2))


@pytest.mark.parametrize("equation", ["GESC,GSM->EGCM", "SGC,GSM->GCM", "BNLD,BNTD->BNL"])
@pytest.mark.parametrize("arithmetic", [FLOAT32, _ROUNDED])
def test_an_einsum_of_another_form_than_matrices_is_refused(equation, arithmetic):
    with pytest.raises(ValueError, match=f"^einsum: expected a batch .*got '{equation}'"):
        arithmetic.einsum(equation, _normal(2, 2, 2), _normal(2, 2, 2), name="y")


@pytest.mark.parametrize(
    ("equation", "want"), [("BLM,MH->BLH", "BLH"), ("EGCM,EMH->E(GC)H", "EGH"), ("BM", "BM")]
)
def test_merged_dims_are_split_as_the_first_of_them(equation, want):
    assert result_dims(equation) == want


def test_products_have_dtype_of_rows():
    x = tf.cast(_normal(2, 3, 7), tf.bfloat16)
    y, d_x, d_weight = _with_gradients(
        functools.partial(FLOAT32.project, "BLH,HM->BLM"), x, _normal(7, 4)
    )
    assert (y.dtype, d_x.dtype, d_weight.dtype) == (tf.bfloat16, tf.bfloat16, tf.float32)


@pytest.mark.parametrize(("depth", "width"), [(4, 7), (7, 4)])
def test_weight_gradient_transposes_narrower_factor(depth, width):
    def fn(args):
        project = functools.partial(FLOAT32.project, "BM,MH->BH")
        _, _, d_weight = _with_gradients(project, args.x, args.weight)
        return NestedMap(d_weight=d_weight)

    shapes = NestedMap(x=(3, depth), weight=(depth, width))
    specs = shapes.Transform(lambda shape: TensorSpec(shape, "float32", "__"))
    text = building.compile_fn(fn, 1, args=specs).compiled.as_text()
    dots = re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(", text)
    assert dots == [(str(min(depth, width)), str(max(depth, width)))]


def _in_16_bits(x):
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)


def _rounded_project(equation, a, b):
    return _ROUNDED.project(equation, a, b)


def _rounded_einsum(equation, a, b):
    return _ROUNDED.einsum(equation, a, b, name="y")


@pytest.mark.parametrize(
    ("product", "equation", "a_shape", "b_shape"),
    [
        (_rounded_project, "BLM,MH->BLH", (2, 3, 4), (4, 8)),
        (_rounded_project, "BLND,NDM->BLM", (2, 3, 4, 6), (4, 6, 5)),
        (_rounded_project, "EGCM,EMH->EGCH", (2, 3, 5, 4), (2, 4, 7)),
        (_rounded_project, "EGCH,EHM->EGCM", (2, 3, 5, 8), (2, 8, 4)),
        (_rounded_einsum, "BNLT,BNTD->BNLD", (2, 3, 4, 6), (2, 3, 6, 8)),
        (_rounded_einsum, "BNLD,BNTD->BNLT", (2, 3, 4, 6), (2, 3, 8, 6)),
        (_rounded_einsum, "GSEC,GSM->EGCM", (2, 3, 4, 6), (2, 3, 8)),
        (_rounded_einsum, "GSEC,GECM->GSM", (2, 3, 4, 6), (2, 4, 6, 8)),
    ],
)
def test_bfloat16_rounds_each_factor_and_nothing_else(product, equation, a_shape, b_shape):
    a, b = _normal(*a_shape), _normal(*b_shape)

    def fn(args):
        y, d_a, d_b = _with_gradients(functools.partial(product, equation), args.a, args.b)
        return NestedMap(y=y, d_a=d_a, d_b=d_b)

    specs = NestedMap(a=a_shape, b=b_shape).Transform(lambda s: functions.f32(s, "_" * len(s)))
    result = building.compile_fn(fn, 1, args=specs)(NestedMap(a=a.numpy(), b=b.numpy()))
    got = [np.asarray(result[name]) for name in ("y", "d_a", "d_b")]
    d_y = _in_16_bits(_normal(*got[0].shape))
    a16, b16 = _in_16_bits(a), _in_16_bits(b)
    with tf.GradientTape() as tape:
        tape.watch([a16, b16])
        y = tf.einsum(equation, a16, b16)
    wanted = [y, *tape.gradient(y, [a16, b16], d_y)]
    for x, want, wide in zip(got, wanted, _with_einsum(equation, a, b), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)
        assert 1e-4 < np.linalg.norm(x - wide) / np.linalg.norm(wide) < 2**-7


_TENSORS = (Rounded.RESULT, Rounded.LEFT, Rounded.RIGHT)


@pytest.mark.parametrize(
    ("has_bfloat16_results", "equation", "a_shape", "b_shape"),
    [
        (True, "EGCM,EMH->E(GC)H", (2, 3, 5, 4), (2, 4, 8)),
        (True, "BNLD,BNTD->BNLT", (2, 3, 4, 6), (2, 3, 8, 6)),
        (True, "GSEC,GSM->EGCM", (2, 3, 4, 6), (2, 3, 8)),
        (False, "GSEC,GSM->EGCM", (2, 3, 4, 6), (2, 3, 8)),
    ],
)
def test_tensors_between_products_are_rounded_where_xla_has_such_products(
    monkeypatch, has_bfloat16_results, equation, a_shape, b_shape
):
    monkeypatch.setattr(products, "_has_bfloat16_results", lambda: has_bfloat16_results)
    product = functools.partial(_ROUNDED.einsum, name="y")
    if equation.startswith("E"):
        product = _ROUNDED.project

    def fn(args):
        results = NestedMap()
        for rounded in (Rounded.NOTHING, *_TENSORS):
            multiply = functools.partial(product, equation, rounded=rounded)
            y, d_a, d_b = _with_gradients(multiply, args.a, args.b)
            results[rounded.name] = NestedMap(y=y, d_a=d_a, d_b=d_b)
        return results

    specs = NestedMap(a=a_shape, b=b_shape).Transform(lambda s: functions.f32(s, "_" * len(s)))
    program = building.export_fn(fn, 1, args=specs)
    text = export.deserialize(bytearray(program.exported)).mlir_module()
    dtypes = re.findall(r"dot_general .*-> tensor<[^>]*x(\w+)>", text)
    assert len(dtypes) >= 6
    assert dtypes.count("bf16") == (len(_TENSORS) if has_bfloat16_results else 0)

    # The compiler may keep the digits of such a result, but not lose more of them.
    results = compile_program(program)(functions.randoms(specs, 1)).Transform(np.asarray)
    order = (Rounded.LEFT, Rounded.RIGHT, Rounded.RESULT)  # d_a, d_b and y by name.
    for rounded in _TENSORS:
        changed = results[rounded.name].Flatten()
        for tensor, got, want in zip(order, changed, results.NOTHING.Flatten(), strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want, rtol=2**-8 if tensor is rounded else 0)


def _with_einsum(equation, a, b):
    return _with_gradients(lambda a, b: tf.einsum(equation, a, b), a, b)


def test_bfloat16_activations_are_multiplied_as_ever():
    x, weight = tf.cast(_normal(2, 3, 7), tf.bfloat16), _normal(7, 4)
    got_tensors = _with_gradients(functools.partial(_ROUNDED.project, "BLH,HM->BLM"), x, weight)
    want_tensors = _with_gradients(functools.partial(FLOAT32.project, "BLH,HM->BLM"), x, weight)
    for got, want in zip(got_tensors, want_tensors, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


_EXPERTS = NestedMap(
    x=functions.f32((8, 4, 16), "GSM"),
    mask=functions.f32((8, 4, 8, 2), "GSEC"),
    wi=functions.f32((8, 16, 32), "EMH"),
    wo=functions.f32((8, 32, 16), "EHM"),
    dense=functions.f32((16, 12), "MH"),
)


def _exported_experts(arithmetic, num_partitions):
    """Dispatches, applies experts, combines and projects, with the gradients of all factors."""
    annotate = Annotator(functions.partitioning(num_partitions)).annotate
    between = Rounded.RESULT | Rounded.LEFT

    def fn(args):
        leaves = args.Flatten()
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            x_EGCM = arithmetic.einsum(
                "GSEC,GSM->EGCM", args.mask, args.x, name="dispatch", rounded=Rounded.RESULT
            )
            x_EGCM = annotate(x_EGCM, "EGCM")
            h_EGH = arithmetic.project("EGCM,EMH->E(GC)H", x_EGCM, args.wi, rounded=between)
            h_EGH = annotate(tf.nn.relu(h_EGH), "EGH")
            y_EGM = arithmetic.project("E(GC)H,EHM->E(GC)M", h_EGH, args.wo, rounded=between)
            y_EGCM = annotate(tf.reshape(y_EGM, x_EGCM.shape), "EGCM")
            y_GECM = annotate(tf.transpose(y_EGCM, [1, 0, 2, 3]), "GECM")
            y_GSM = arithmetic.einsum(
                "GSEC,GECM->GSM", args.mask, y_GECM, name="combine", rounded=Rounded.RIGHT
            )
            y_GSM = annotate(y_GSM, "GSM")
            y_GSH = arithmetic.project("GSM,MH->GSH", y_GSM, args.dense)
            loss = tf.reduce_sum(tf.square(y_GSH))
        return NestedMap(y=y_GSH, d=args.Pack(tape.gradient(loss, leaves)))

    dims = {"y": "GSH"} | building.dims_of(d=_EXPERTS)
    annotated = AnnotatedFn("experts", fn, ("args",), (_EXPERTS,), dims)
    return lowering.export(annotated, functions.partitioning(num_partitions))


def _compiled_experts(arithmetic, num_partitions):
    return compile_program(_exported_experts(arithmetic, num_partitions))


def _collectives(run):
    names = r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\("
    return collections.Counter(re.findall(names, run.compiled.as_text()))


def test_bfloat16_products_equal_on_1_2_4_and_8_partitions():
    args = functions.randoms(_EXPERTS, 1)
    runs = [_compiled_experts(_ROUNDED, count) for count in (1, 2, 4, 8)]
    want, *results = [run(args).Transform(np.asarray) for run in runs]
    for result in results:
        for (path, got), one in zip(result.FlattenItems(), want.Flatten(), strict=True):
            # Another order of a sum may round an intermediate the other way.
            error = np.linalg.norm(got - one) / np.linalg.norm(one)
            assert error < 1e-3, path
    wide = _compiled_experts(FLOAT32, 8)
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
    text = topology.compile_program(_exported_experts(_ROUNDED, 8), machine).compiled.as_text()
    dtypes = dict(re.findall(r"%(\S+) = (\w+)\[", text))
    found = [re.findall(r"%([\w.-]+)", operands) for operands in re.findall(products, text)]
    assert len(found) >= 10
    assert {dtypes[name] for names in found for name in names} == {"bf16"}
