"""TensorFlow's private names behave like their public relatives."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import tf_private


def test_mapped_equals_vectorized_map():
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype("float32")
    weights = np.random.default_rng(1).standard_normal((3, 5, 2)).astype("float32")

    def fn(i):
        y = tf.matmul(tf.gather(x, i), tf.gather(weights, i))
        return [y, tf.reduce_sum(y) + tf.cast(i, tf.float32)]

    @tf.function(autograph=False)
    def mapped():
        return tf_private.mapped(fn, 3)

    want = tf.vectorized_map(fn, tf.range(3))
    for result, expected in zip(mapped(), want, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_mapped_has_the_gradient_of_a_sum_over_the_indices():
    @tf.function(autograph=False)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,) = tf_private.mapped(lambda i: [tf.square(tf.gather(x, i))], 3)
        return tape.gradient(y, x)

    np.testing.assert_allclose(gradient(tf.constant([1.0, -2.0, 3.0])), [2.0, -4.0, 6.0])


def test_a_text_attribute_is_kept_in_the_graph():
    with tf.Graph().as_default() as graph:
        tf_private.set_text_attribute(tf.zeros([2], name="x").op, "_note", "BLM")
    assert graph.get_operation_by_name("x").get_attr("_note") == b"BLM"
    (node,) = (node for node in graph.as_graph_def().node if node.name == "x")
    assert node.attr["_note"].s == b"BLM"
