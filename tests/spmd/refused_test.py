"""Programs that XLA's partitioner would get wrong are refused by the operation's name."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate, windows
from lingvo_gshard.sharding.layout import Partitioning
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.spmd import annotated_fn
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from tests.spmd import functions

_PIXELS = functions.f32((8, 6, 6, 2), "____")


def _trace(pool, num_partitions, pixels=_PIXELS):
    """Traces the gradient of `pool`, a function of an image."""

    def fn(image):
        with tf.GradientTape() as tape:
            tape.watch(image.pixels)
            y = pool(image.pixels)
        return NestedMap(d=tape.gradient(y, image.pixels))

    annotated = AnnotatedFn("vision", fn, ("image",), (NestedMap(pixels=pixels),))
    annotated_fn.trace(annotated, functions.partitioning(num_partitions))


def _looped(x):
    return tf.while_loop(
        lambda i, x: i < 2,
        lambda i, x: (i + 1, tf.nn.max_pool2d(x, 3, 1, "SAME")),
        (0, x),
        maximum_iterations=2,
    )[1]


def _with_sizes(sizes):
    """MaxPoolV2 takes sizes and strides as tensors."""
    return lambda x: tf.raw_ops.MaxPoolV2(
        input=x, ksize=sizes(x), strides=[1, 2, 2, 1], padding="SAME"
    )


@pytest.mark.parametrize(
    ("pool", "operation"),
    [
        (lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME"), r"MaxPoolGrad \(MaxPoolGrad\)"),
        (lambda x: tf.nn.max_pool2d(x, (1, 2), 1, "VALID"), r"MaxPoolGrad \(MaxPoolGrad\)"),
        (lambda x: tf.nn.max_pool1d(x[0], 2, 1, "SAME"), r"MaxPoolGrad \(MaxPoolGrad\)"),
        (lambda x: tf.nn.max_pool3d(x[None], 2, 1, "SAME"), r"\(MaxPool3DGrad\)"),
        (lambda x: tf.nn.pool(x, (2, 2), "MAX", dilations=(2, 2)), r"\(MaxPoolGrad\)"),
        (_looped, r"\(MaxPoolGrad\)"),
        (_with_sizes(lambda x: [1, 3, 3, 1]), r"\(MaxPoolGradV2\).*windows \[1, 3, 3, 1\]"),
        (
            _with_sizes(lambda x: tf.where(x[0, 0, 0, 0] > 9, 2, 1) * [1, 1, 1, 1]),
            r"\(MaxPoolGradV2\).*windows None",
        ),
    ],
)
def test_the_gradient_of_overlapping_windows_is_refused(pool, operation):
    with pytest.raises(ValueError, match=f"vision: .*{operation}.*; pool with lingvo_gshard.max_p"):
        _trace(pool, 2)
    _trace(pool, 1)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"),
        lambda x: tf.nn.max_pool2d(x, 2, 3, "VALID"),
        lambda x: tf.nn.avg_pool2d(x, 3, 1, "SAME"),
        _with_sizes(lambda x: [1, 2, 2, 1]),
    ],
)
def test_other_poolings_are_not(pool):
    _trace(pool, 2)


_MESH = Mesh(("x", "y"), (2, 2))


def _trace_convolution(convolve, kernel, axes=(None, "x", "y", None)):
    """Traces the gradients of `convolve`, a function of an image that is split along `axes`."""

    def fn(weights, image):
        with tf.GradientTape() as tape:
            tape.watch(weights.kernel)
            pixels = annotate.mesh_split(image.pixels, _MESH, axes)
            y = convolve(pixels, annotate.replicate(weights.kernel))
        return NestedMap(d=tape.gradient(y, weights.kernel))

    trees = (NestedMap(kernel=functions.f32(kernel, "_" * len(kernel))), NestedMap(pixels=_PIXELS))
    annotated = AnnotatedFn("vision", fn, ("weights", "image"), trees)
    annotated_fn.trace(annotated, Partitioning(_MESH, ()))


_COPIES = (None, "x", None, None)


@pytest.mark.parametrize(
    ("convolve", "kernel", "axes"),
    [
        (lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), (3, 3, 2, 4), _COPIES),
        (lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), (3, 3, 2, 4), (("x",), None, None, None)),
        (lambda x, k: tf.nn.conv3d(x[..., None], k, [1] * 5, "SAME"), (3, 3, 2, 1, 4), _COPIES),
    ],
)
def test_the_gradient_of_a_kernel_is_refused_where_images_have_copies(convolve, kernel, axes):
    with pytest.raises(ValueError, match=r"XlaSharding\S* makes them.*lingvo_gshard.convolution"):
        _trace_convolution(convolve, kernel, axes)
    if len(kernel) == 4:
        _trace_convolution(convolve, kernel)  # Split over all partitions, it is right.
        _trace_convolution(lambda x, k: windows.convolution(x, k, (1, 1), "SAME"), kernel, axes)


@pytest.mark.parametrize("make_copies", [True, False])
def test_a_kernel_that_may_be_split_is_refused_where_images_have_copies(make_copies):
    def fn(weights, image):
        axes = _COPIES if make_copies else (None, "x", "y", None)
        pixels = annotate.mesh_split(image.pixels, _MESH, axes)
        return NestedMap(y=tf.nn.conv2d(pixels, weights.kernel, 1, "SAME"))

    trees = (NestedMap(kernel=functions.f32((3, 3, 2, 4), "___H")), NestedMap(pixels=_PIXELS))
    annotated = AnnotatedFn("vision", fn, ("weights", "image"), trees)
    table = Partitioning.from_dict(_MESH, {"H": ("x", "y")})
    if not make_copies:
        annotated_fn.trace(annotated, table)
        return
    with pytest.raises(ValueError, match=r"vision: Conv2D \(Conv2D\).*gshard.replicate\(kernel\)"):
        annotated_fn.trace(annotated, table)


def test_the_gradient_of_a_kernel_that_is_dilated_by_a_reshape_is_refused():
    with pytest.raises(ValueError, match="as .*SpaceToBatchND.* makes them"):
        _trace_convolution(
            lambda x, k: tf.nn.convolution(x, k, padding="SAME", dilations=2), (3, 3, 2, 4)
        )


def test_the_gradient_of_a_depthwise_kernel_is_refused():
    def convolve(x, k):
        return tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME")

    with pytest.raises(ValueError, match="of a kernel with groups.*lingvo_gshard.convolution"):
        _trace_convolution(convolve, (3, 3, 2, 4))


def test_the_gradient_of_a_kernel_with_groups_is_refused():
    def convolve(x, k):
        return tf.nn.conv2d(x, k, 1, "SAME")

    with pytest.raises(ValueError, match="of a kernel with groups.*lingvo_gshard.convolution"):
        _trace_convolution(convolve, (3, 3, 1, 4))


@pytest.mark.parametrize(("pad", "is_refused"), [(2, False), (3, True)])
def test_more_padding_than_the_window_reaches_is_refused(pad, is_refused):
    pads = [[0, 0], [pad, 0], [0, 0], [0, 0]]

    def fn(image):
        with tf.GradientTape() as tape:
            tape.watch(image.pixels)
            y = tf.nn.conv2d(image.pixels, tf.ones([3, 3, 2, 4]), 2, pads)
        return NestedMap(d=tape.gradient(y, image.pixels))

    annotated = AnnotatedFn("vision", fn, ("image",), (NestedMap(pixels=_PIXELS),))
    if not is_refused:
        annotated_fn.trace(annotated, functions.partitioning(2))
        return
    with pytest.raises(ValueError, match="3 elements of padding before a window of 3.*tf.pad"):
        annotated_fn.trace(annotated, functions.partitioning(2))


def test_the_gradient_of_a_bilinear_resizing_is_refused():
    with pytest.raises(ValueError, match="ResizeBilinearGrad.*of a bilinear resizing.*tf.einsum"):
        _trace(lambda x: tf.image.resize(x, (9, 5), "bilinear"), 2)
    _trace(lambda x: tf.image.resize(x, (9, 5), "bilinear"), 1)
    _trace(lambda x: tf.compat.v1.image.resize_bilinear(x, (9, 5), align_corners=True), 2)


def test_values_without_a_gradient_are_not():
    def fn(image):
        return NestedMap(y=tf.nn.max_pool2d(image.pixels, 3, 1, "SAME"))

    annotated = AnnotatedFn("vision", fn, ("image",), (NestedMap(pixels=_PIXELS),))
    annotated_fn.trace(annotated, functions.partitioning(2))
