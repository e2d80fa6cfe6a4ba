"""The products of traced functions, with the letters of their dims."""

import math

import pytest
import tensorflow as tf

from lingvo_gshard.core.base_layer import Use, constant, gaussian
from lingvo_gshard.layers.numerics import NOTED
from lingvo_gshard.model.graph_products import GraphReader
from lingvo_gshard.sharding.annotator import Annotator
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from xla_spmd.mesh import Mesh

_ANNOTATOR = Annotator(Partitioning(Mesh.flat(1), ()))
_X = TensorSpec((2, 3, 4), "float32", "BLM")
_WI = gaussian((4, 5), "MH", fan_in=4)
_HEADS = gaussian((4, 2, 6), "MND", fan_in=4, columns=2)


def _read(fn, *specs):
    """Returns the equations, sizes and times of a function's products."""
    signature = [tf.TensorSpec(spec.shape, getattr(spec, "dtype", "float32")) for spec in specs]
    function = tf.function(fn, input_signature=signature, autograph=False)
    graph = function.get_concrete_function().graph
    return GraphReader(graph, specs).products


def _equations(fn, *specs):
    return [product.equation for product in _read(fn, *specs)]


@pytest.mark.parametrize(
    "multiplied",
    [
        lambda x, w: tf.einsum("BLM,MH->BLH", x, w),
        lambda x, w: tf.einsum("blm,mh->blh", x, w),
        lambda x, w: tf.einsum("...m,mh->...h", x, w),
        lambda x, w: x @ w,
        lambda x, w: tf.matmul(x, tf.transpose(w), transpose_b=True),
        lambda x, w: tf.reshape(tf.reshape(x, [6, 4]) @ w, [2, 3, 5]),
        lambda x, w: tf.tensordot(x, w, 1),
        lambda x, w: tf.einsum("mh,blm->blh", w, x),
        lambda x, w: tf.cast(x, tf.bfloat16) @ tf.cast(w, tf.bfloat16),
        lambda x, w: tf.nn.relu(x) @ (2.0 * w),
    ],
)
def test_one_product_in_many_ways(multiplied):
    (product,) = _read(multiplied, _X, _WI)
    assert product.equation == "BLM,MH->BLH"
    assert product.sizes == {"B": 2, "L": 3, "M": 4, "H": 5}
    assert (product.times, product.weight, product.is_lookup) == (1, _WI, False)


def test_heads_are_merged_and_split():
    """All heads are one dim of a matrix product; a row of the other weight belongs to one head."""

    def fn(x, wq, wo):
        q = tf.reshape(tf.reshape(x, [6, 4]) @ tf.reshape(wq, [4, 12]), [2, 3, 2, 6])
        return tf.reshape(q, [2, 3, 12]) @ tf.reshape(wo, [12, 4])

    wo = gaussian((2, 6, 4), "NDM", fan_in=12, rows=2)
    assert _equations(fn, _X, _HEADS, wo) == ["BLM,MND->BLND", "BLND,NDM->BLM"]


def test_queries_and_keys_of_the_same_tokens():
    """The keys' dim L is a different dim in the product of both."""

    def fn(x, w):
        heads = tf.transpose(tf.einsum("BLM,MND->BLND", x, w), [0, 2, 1, 3])
        weights = tf.nn.softmax(tf.matmul(heads, heads, transpose_b=True))
        return weights @ heads

    _, logits, mixed = _read(fn, _X, _HEADS)
    assert logits.equation == "BNLD,BN_D->BNL_" and logits.sizes["_"] == 3
    assert mixed.equation == "BNL_,BN_D->BNLD" and mixed.weight is None


def test_annotations_name_dims():
    def fn(x, w):
        groups = _ANNOTATOR.annotate(tf.reshape(x, [3, 2, 4]), "GSM")
        return groups @ w

    assert _equations(fn, _X, _WI) == ["GSM,MH->GSH"]


def test_dims_without_letters_have_some_that_no_table_splits():
    router = gaussian((4, 8), "M_", fan_in=4, use=Use.ROUTER)
    assert _equations(lambda x, w: x @ w, _X, router) == ["BLM,M_->BL_"]

    def fn(x, w):
        return tf.concat([x, x], -1) @ w

    unnamed = gaussian((8, 8), "__", fan_in=4)
    assert _equations(fn, _X, unnamed) == ["BL_,_A->BLA"]


def test_norms_multiply_by_their_scales_and_biases_are_only_added():
    scale, bias = constant((4,), "M", 1.0), constant((4,), "M", 0.0)
    (product,) = _read(lambda x, scale, bias: x * scale + bias, _X, scale, bias)
    assert (product.equation, product.weight) == ("BLM,M->BLM", scale)


def test_rows_of_tables_are_looked_up():
    ids = TensorSpec((2, 3), "int32", "BL")
    table = gaussian((9, 4), "VM", fan_in=4, use=Use.TABLE)
    (product,) = _read(lambda ids, table: tf.gather(table, ids), ids, table)
    assert product.equation == "BLV,VM->BLM" and product.is_lookup
    assert product.sizes == {"B": 2, "L": 3, "V": 9, "M": 4}


def test_a_convolution_is_a_product_at_each_place_of_its_result():
    image = TensorSpec((2, 8, 6, 3), "float32", "BXYC")
    kernel = gaussian((5, 5, 3, 7), "____", fan_in=75)

    def fn(image, kernel):
        return tf.nn.conv2d(image, kernel, (2, 2), "SAME")

    (product,) = _read(fn, image, kernel)
    assert math.prod(product.sizes.values()) == 2 * (4 * 3) * (5 * 5 * 3) * 7
    assert product.equation.startswith("BXY") and product.weight is kernel


def test_loops_and_calls():
    @tf.function(autograph=False)
    def called(x, w):
        return tf.nn.relu(x @ w)

    def fn(x, stack):
        def body(i, x):
            weight = tf.gather(stack, i)
            return i + 1, called(x, _ANNOTATOR.annotate(weight, "MH"))

        _, x = tf.while_loop(lambda i, _: i < 3, body, [0, x], maximum_iterations=3)
        return x @ stack[0]

    square = gaussian((4, 4), "MH", fan_in=4).stacked(3)
    inside, after = _read(fn, _X, square)
    assert (inside.equation, inside.times) == ("BLM,MH->BLH", 3)
    assert inside.weight is square and after.times == 1


def test_recorded_products_are_left_out():
    def fn(x, w):
        with tf.name_scope("layer"):
            for _ in range(2):
                with tf.name_scope(NOTED):
                    x @ w
            return tf.nn.relu(x) @ w

    (product,) = _read(fn, _X, _WI)
    assert product.scope == "layer"
