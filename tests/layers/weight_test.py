"""Weights kept in 16 and 8 bits: NumPy's rounding, exact products, and XLA's factors.

K contracted, N columns, R rows, V vocabulary, M model.
"""

import functools
import re

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.base_layer import Use, gaussian
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import stored_weights
from lingvo_gshard.layers.numerics import PLAIN
from lingvo_gshard.layers.stored_weights import Numbers
from lingvo_gshard.layers.weight import Weight
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building


def _normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _compiled(fn):
    """Compiles by XLA: TensorFlow's own kernels lack products of bfloat16 in float32."""
    return tf.function(fn, jit_compile=True, autograph=False)()


def _quantized(x):
    """NumPy's int8 values and scales of the last dim."""
    scales = np.abs(x).max(-1) / np.float32(127)
    return np.rint(x / scales[..., None]).astype(np.int8), scales


# A spec, its order of axes once kept, and how many of them are contracted.
_CASES = {
    "MND": (gaussian((6, 2, 5), "MND", fan_in=6, columns=2, use=Use.FACTOR), (1, 2, 0), 1),
    "NDM": (gaussian((2, 5, 6), "NDM", fan_in=10, rows=2, use=Use.FACTOR), (2, 0, 1), 2),
    "EMH": (gaussian((3, 6, 7), "EMH", fan_in=6, use=Use.FACTOR), (0, 2, 1), 1),
    "VM": (gaussian((9, 6), "VM", fan_in=6, use=Use.TABLE), (0, 1), 1),
}


@pytest.mark.parametrize("dims", _CASES)
@pytest.mark.parametrize("numbers", [Numbers.FLOAT32_LAID_OUT, Numbers.BFLOAT16, Numbers.INT8])
def test_weights_are_laid_out_and_rounded_as_numpy_does(dims, numbers):
    spec, order, num_contracted = _CASES[dims]
    weight = _normal(*spec.shape)
    theta = NestedMap(w=tf.constant(weight))
    specs = NestedMap(w=spec)
    kept = stored_weights.kept(theta, specs, numbers)

    laid_out = weight.transpose(order)
    if numbers is not Numbers.INT8:
        np.testing.assert_array_equal(kept.w.kept, laid_out.astype(numbers.dtype))
    else:
        outer = laid_out.shape[: laid_out.ndim - num_contracted]
        rounded, scales = _quantized(laid_out.reshape(*outer, -1))
        np.testing.assert_array_equal(kept.w.kept, rounded.reshape(laid_out.shape))
        np.testing.assert_allclose(kept.w.scales, scales, rtol=1e-6)

    # The specs describe the tensors, and the dims the axes.
    assert stored_weights.numbers_of(kept) is numbers
    kept_specs = stored_weights.specs(specs, numbers)
    assert kept_specs.w.kept.dims == "".join(dims[axis] for axis in order)
    for tensor, kept_spec in zip(kept.Flatten(), kept_specs.Flatten(), strict=True):
        assert (tuple(tensor.shape), tensor.dtype.name) == (kept_spec.shape, kept_spec.dtype)
        assert kept_specs.w.kept.dims.startswith(kept_spec.dims)


def test_exact_weights_and_rows_of_zeros_are_unchanged():
    specs = NestedMap(
        router=gaussian((4, 3), "M_", fan_in=4), w=gaussian((4, 3), "MH", fan_in=4, use=Use.FACTOR)
    )
    theta = NestedMap(router=_normal(4, 3), w=np.zeros((4, 3), np.float32))
    kept = stored_weights.kept(theta.Transform(tf.constant), specs, Numbers.INT8)
    np.testing.assert_array_equal(kept.router, theta.router)
    np.testing.assert_array_equal(kept.w.kept, np.zeros((3, 4), np.int8))
    np.testing.assert_array_equal(Weight.of(kept.w).product(tf.ones([2, 4])), 0.0)

    # Float32 is today's theta.
    same = stored_weights.kept(theta, specs, Numbers.FLOAT32)
    assert same.w is theta.w
    assert stored_weights.numbers_of(same) is Numbers.FLOAT32


@pytest.mark.parametrize("rows", [1, 4, 80])  # A single one, the weight left, and right.
def test_int8_products_are_exact(rows):
    x = _normal(rows, 10)
    rounded, scales = _quantized(_normal(7, 10))
    x_rounded, x_scales = _quantized(x)

    sums = x_rounded.astype(np.int64) @ rounded.astype(np.int64).T
    want = sums * x_scales.astype(np.float64)[:, None] * scales
    weight = NestedMap(kept=tf.constant(rounded), scales=tf.constant(scales))
    np.testing.assert_allclose(Weight.of(weight).product(x), want, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 80])
def test_bfloat16_products_are_of_rounded_factors(rows):
    x = _normal(rows, 10)
    weight = _normal(7, 10).astype(ml_dtypes.bfloat16)
    want = x.astype(ml_dtypes.bfloat16).astype(np.float64) @ weight.astype(np.float64).T
    kept = NestedMap(kept=tf.constant(weight))
    got = _compiled(lambda: Weight.of(kept).product(tf.constant(x)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "x_shape", "dims"),
    [
        ("BLM,MND->BLND", (2, 3, 6), "MND"),
        ("BLND,NDM->BLM", (2, 3, 2, 5), "NDM"),
        ("EGCM,EMH->EGCH", (3, 2, 4, 6), "EMH"),
    ],
)
def test_projections_by_kept_weights_are_near_those_by_float32(equation, x_shape, dims):
    spec, _, _ = _CASES[dims]
    x = tf.constant(_normal(*x_shape))
    weight = tf.constant(_normal(*spec.shape))
    want = PLAIN.einsum(equation, x, weight)

    errors = {Numbers.FLOAT32_LAID_OUT: 1e-5, Numbers.BFLOAT16: 0.03, Numbers.INT8: 0.12}
    for numbers, error in errors.items():
        kept = stored_weights.kept(NestedMap(w=weight), NestedMap(w=spec), numbers)
        got = _compiled(functools.partial(PLAIN.einsum, equation, x, kept.w))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=error)
        assert (error > 1e-5) == (np.abs(got - want).max() > 1e-5)


def test_rows_and_the_transpose_of_a_table():
    spec, _, _ = _CASES["VM"]
    table = tf.constant(_normal(9, 6))
    ids = tf.constant([[3, 0], [8, 3]])
    x = tf.constant(_normal(2, 3, 6))

    errors = dict(zip(Numbers, (0, 0, 0.03, 0.08), strict=True))
    for numbers, error in errors.items():
        kept = stored_weights.kept(NestedMap(w=table), NestedMap(w=spec), numbers).w
        np.testing.assert_allclose(Weight.of(kept).rows(ids), tf.gather(table, ids), atol=error)
        factor = Weight.of(kept).transposed()
        logits = _compiled(functools.partial(PLAIN.einsum, "BLM,MV->BLV", x, factor))
        np.testing.assert_allclose(logits, tf.einsum("BLM,VM->BLV", x, table), atol=1e-5 + error)


@pytest.mark.parametrize(("rows", "dot"), [(4, "s32[48,4]"), (1, "s32[48,2]"), (80, "s32[80,48]")])
def test_few_rows_are_the_right_factor_of_int8_products(rows, dot):
    specs = NestedMap(
        kept=TensorSpec((48, 32), "int8", "HM"), scales=TensorSpec((48,), "float32", "H")
    )
    run = building.compile_fn(
        lambda x, w: NestedMap(y=Weight.of(w).product(x.x)),
        1,
        x=NestedMap(x=TensorSpec((rows, 32), "float32", "B_")),
        w=specs,
    )
    # The compiler neither swaps the factors nor widens them.
    text = run.compiled.as_text()
    assert re.findall(r"= (\S+)\{[\d,]+\} dot\(", text) == [dot]
