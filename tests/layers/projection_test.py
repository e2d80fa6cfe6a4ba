"""Products of rows with weights: values, gradients, and how a CPU computes the gradients."""

import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.projection import matmul, project
from lingvo_gshard.sharding.layout import TensorSpec
from tests.layers import building


def _normal(*shape):
    seed = sum(shape)
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)


def _with_gradients(product, x, weight):
    with tf.GradientTape() as tape:
        tape.watch([x, weight])
        y = product(x, weight)
    return [y, *tape.gradient(y, [x, weight], tf.cast(_normal(*y.shape), y.dtype))]


@pytest.mark.parametrize(
    ("product", "equation", "x_shape", "weight_shape"),
    [
        (project, "BLM,MH->BLH", (2, 3, 4), (4, 7)),
        (project, "BLH,HM->BLM", (2, 3, 7), (7, 4)),
        (project, "BLM,MND->BLND", (2, 3, 5), (5, 4, 6)),
        (lambda x, w: project(x, w, 2), "BLND,NDM->BLM", (2, 3, 4, 6), (4, 6, 5)),
        (matmul, "ERM,EMH->ERH", (2, 3, 4), (2, 4, 7)),
        (matmul, "ERH,EHM->ERM", (2, 3, 7), (2, 7, 4)),
    ],
)
def test_values_and_gradients_equal_einsum(product, equation, x_shape, weight_shape):
    x, weight = _normal(*x_shape), _normal(*weight_shape)
    expected = _with_gradients(lambda x, w: tf.einsum(equation, x, w), x, weight)
    for got, wanted in zip(_with_gradients(product, x, weight), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_products_have_dtype_of_rows():
    x = tf.cast(_normal(2, 3, 7), tf.bfloat16)
    y, d_x, d_weight = _with_gradients(project, x, _normal(7, 4))
    assert (y.dtype, d_x.dtype, d_weight.dtype) == (tf.bfloat16, tf.bfloat16, tf.float32)


@pytest.mark.parametrize(("depth", "width"), [(4, 7), (7, 4)])
def test_weight_gradient_transposes_narrower_factor(depth, width):
    def fn(args):
        _, _, d_weight = _with_gradients(project, args.x, args.weight)
        return NestedMap(d_weight=d_weight)

    shapes = NestedMap(x=(3, depth), weight=(depth, width))
    specs = shapes.Transform(lambda shape: TensorSpec(shape, "float32", "__"))
    text = building.compile_fn(fn, 1, args=specs).as_text()
    dots = re.findall(r"f32\[(\d+),(\d+)\]\S* dot\(", text)
    assert dots == [(str(min(depth, width)), str(max(depth, width)))]
