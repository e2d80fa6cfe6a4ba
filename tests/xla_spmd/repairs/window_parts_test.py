"""TensorFlow's own operators of windows, split in ways that XLA gets wrong, equal one device's."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import lowering
from lingvo_gshard.spmd.annotated_fn import AnnotatedFn
from lingvo_gshard.spmd.executable import compile_program
from tests.spmd import functions
from xla_spmd.mesh import Mesh
from xla_spmd.repairs import window_parts

_MESH = Mesh(("x", "y"), (2, 4))
_CHANNELS = 4


def _convolved(x, kernel):
    """Results by the operator; `kernel` is [3, 2, channels, 2]."""
    pads = [[0, 0], [3, 1], [0, 2], [0, 0]]
    return {
        "conv2d": tf.nn.conv2d(x, kernel, 1, "SAME"),
        "strides": tf.nn.conv2d(x, kernel, [2, 3], "VALID"),
        "more_pads_than_the_window_reaches": tf.nn.conv2d(x, kernel, 2, pads),
        "dilations": tf.nn.convolution(x, kernel, padding="SAME", dilations=[2, 1]),
        "depthwise": tf.nn.depthwise_conv2d(x, kernel, [1, 2, 2, 1], "SAME"),
        "transposed": tf.nn.conv2d_transpose(
            x, tf.transpose(kernel, [0, 1, 3, 2]), [x.shape[0], 2 * x.shape[1], x.shape[2], 2],
            [2, 1], "SAME",
        ),
        "conv3d": tf.nn.conv3d(x[..., None], kernel[:, :, :, None], [1] * 5, "SAME"),
    }  # fmt: skip


def _pooled(x, kernel):
    del kernel
    return {
        "overlapping": tf.nn.max_pool2d(x, 3, 1, "SAME"),
        "rows_overlap": tf.nn.max_pool2d(x, (3, 2), 2, "VALID"),
        "disjoint": tf.nn.max_pool2d(x, 2, 2, "SAME"),
        "gaps": tf.nn.max_pool2d(x, 1, 2, "VALID"),
        "pool3d": tf.nn.max_pool3d(x[..., None], (3, 1, 2), 1, "SAME"),
        "dilated": tf.nn.pool(x, (2, 2), "MAX", dilations=(2, 2)),
        "average": tf.nn.avg_pool2d(x, 3, 2, "SAME"),
    }


def _resized(x, kernel):
    del kernel
    rows = x.shape[1]
    return {
        "bilinear": tf.image.resize(x, (rows + 3, 9)),
        "smaller": tf.image.resize(x, (rows // 2 + 1, 4)),
        "twice": tf.image.resize(x, (2 * rows, 2 * x.shape[2])),
    }


_SPLITS = {
    "rows": (None, ("x", "y"), None, None),
    "rows, with copies": (None, "x", None, None),
    "both dims": (None, "y", "x", None),
    "channels": (None, None, "x", "y"),
}


def _values(results, batch, place):
    """The values of `results`, and their gradients by the image and the kernel."""
    values = {}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([batch.x, batch.kernel])
        placed = place(tf.exp(place(batch.x)))
        found = results(placed, batch.kernel)
        losses = {}
        for name, y in found.items():
            weights = tf.cos(tf.reshape(tf.range(tf.size(y), dtype=tf.float32), tf.shape(y)))
            losses[name] = tf.reduce_sum(weights * (place(y) if y.shape.rank == 4 else y))
    for name, y in found.items():
        values[name] = y
        d_x, d_kernel = tape.gradient(
            losses[name], [batch.x, batch.kernel], unconnected_gradients="zero"
        )
        values[f"{name}_d_x"] = d_x
        values[f"{name}_d_kernel"] = d_kernel
    return values


# The fuzzer draws other sizes and splits.
@pytest.mark.slow
@pytest.mark.parametrize("results", [_pooled, _convolved, _resized])
@pytest.mark.parametrize(("rows", "split"), [(3, "rows"), (13, "both dims"), (8, "channels")])
def test_windows_equal_tensorflows(results, rows, split):
    """Values and gradients of each, all in one program."""
    rng = np.random.default_rng(rows)
    batch = NestedMap(
        x=rng.standard_normal((2, rows, 6, _CHANNELS)).astype("f"),
        kernel=rng.standard_normal((3, 2, _CHANNELS, 2)).astype("f"),
    )

    def fn(batch):
        values = _values(results, batch, lambda y: annotate.mesh_split(y, _MESH, _SPLITS[split]))
        return NestedMap(values)

    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "_" * a.ndim))
    parts = Partitioning.from_dict(_MESH, {})
    program = lowering.export(AnnotatedFn("windows", fn, ("batch",), (specs,)), parts)
    got = compile_program(program)(batch)

    want = _values(results, batch.Transform(tf.constant), lambda y: y)
    wrong = []
    for name, value in want.items():
        scale = max(1.0, np.abs(value).max())
        if not np.allclose(got[name], value, rtol=1e-4, atol=1e-5 * scale):
            wrong.append(name)
    assert not wrong


@pytest.mark.parametrize(
    ("num_channels", "axes", "kernel_axes", "result_axes"),
    [
        (2, "___x", "___x", "zyx_"),
        (2, "___y", "___y", "y_x_"),
        (1, "___x", "___y", "____"),  # One channel in two parts.
        (4, "___x", "__x_", "_y__"),
    ],
)
def test_a_sum_over_channels_counts_no_copy(num_channels, axes, kernel_axes, result_axes):
    rng = np.random.default_rng(num_channels)
    batch = NestedMap(
        x=rng.standard_normal((1, 1, 5, num_channels)).astype("f"),
        kernel=rng.standard_normal((1, 2, num_channels, 1)).astype("f"),
    )

    def fn(batch, split):
        x = split(tf.reverse(batch.x, [1]), axes)
        kernel = split(batch.kernel, kernel_axes)
        return NestedMap(y=split(tf.nn.conv2d(x, kernel, [1, 3], "VALID"), result_axes))

    def annotated(batch):
        def split(x, axes):
            return annotate.mesh_split(x, mesh, [None if axis == "_" else axis for axis in axes])

        return fn(batch, split)

    mesh = Mesh(("x", "y", "z"), (2, 2, 2))
    specs = batch.Transform(lambda a: TensorSpec(a.shape, a.dtype.name, "_" * a.ndim))
    parts = Partitioning.from_dict(mesh, {})
    program = lowering.export(AnnotatedFn("channels", annotated, ("batch",), (specs,)), parts)
    got = compile_program(program)(batch)
    want = fn(batch.Transform(tf.constant), lambda x, axes: x)
    np.testing.assert_allclose(got.y, want.y, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("rows", "split", "is_changed"),
    [
        (16, "rows", False),
        (13, "rows", False),  # Uneven, but a row on each device.
        (16, "rows, with copies", True),
        (4, "rows", True),
        (16, "whole", False),
    ],
)
def test_only_windows_that_are_wrong_are_kept_whole(monkeypatch, rows, split, is_changed):
    axes = _SPLITS.get(split, (None, None, None, None))

    def fn(batch):
        with tf.GradientTape() as tape:
            tape.watch([batch.x, batch.kernel])
            x = annotate.mesh_split(batch.x, _MESH, axes)
            y = annotate.mesh_split(tf.nn.conv2d(x, batch.kernel, 1, "SAME"), _MESH, axes)
        d_x, d_kernel = tape.gradient(y, [batch.x, batch.kernel])
        return NestedMap(d_x=d_x, d_kernel=d_kernel)

    specs = NestedMap(
        x=functions.f32((2, rows, 6, _CHANNELS), "____"),
        kernel=functions.f32((3, 2, _CHANNELS, 2), "____"),
    )
    annotated = AnnotatedFn("convolution", fn, ("batch",), (specs,))
    parts = Partitioning.from_dict(_MESH, {})
    program = functions.stablehlo(lowering.export(annotated, parts))
    monkeypatch.setattr(window_parts, "repair", lambda *args: False)
    unrepaired = functions.stablehlo(lowering.export(annotated, parts))
    assert (program != unrepaired) == is_changed


@pytest.mark.parametrize(("stride", "padding"), [(2, [1, 1]), (1, [0, 8])])
def test_a_kernels_gradient_with_more_windows_than_strides(stride, padding):
    """Windows of two elements over 16, which have 16 / stride strides."""

    def gradient(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            y = tf.nn.conv2d(x, kernel, [1, stride, 1, 1], [[0, 0], padding, [0, 0], [0, 0]])
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, kernel)

    def fn(batch):
        x = annotate.split(batch.x, 1, 8)
        return NestedMap(gradient=gradient(x, batch.kernel))

    batch = NestedMap(
        x=np.arange(16, dtype="f").reshape(1, 16, 1, 1), kernel=np.ones((2, 1, 1, 1), "f")
    )
    specs = batch.Transform(lambda a: TensorSpec(a.shape, "float32", "____"))
    parts = Partitioning.from_dict(Mesh.flat(8), {})
    program = lowering.export(AnnotatedFn("windows", fn, ("batch",), (specs,)), parts)
    want = gradient(tf.constant(batch.x), tf.constant(batch.kernel))
    np.testing.assert_allclose(compile_program(program)(batch).gradient, want)


def test_an_images_gradient_with_fewer_windows_than_parts():
    """A single window, whose gradient is whole, over an image in four parts of one element."""

    def gradient(x, kernel, place):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = place(tf.nn.conv1d(place(x, "y"), kernel, 2, "VALID"), None)
            loss = tf.reduce_sum(tf.sin(y))
        return tape.gradient(loss, x)

    def fn(batch):
        def place(tensor, axis):
            return annotate.mesh_split(tensor, _MESH, (None, axis, None))

        return NestedMap(gradient=gradient(batch.x, batch.kernel, place))

    rng = np.random.default_rng(3)
    x, kernel = rng.standard_normal((2, 4)).astype("f")
    batch = NestedMap(x=x.reshape(1, 4, 1), kernel=kernel.reshape(4, 1, 1))
    specs = batch.Transform(lambda a: TensorSpec(a.shape, "float32", "___"))
    parts = Partitioning.from_dict(_MESH, {})
    program = lowering.export(AnnotatedFn("windows", fn, ("batch",), (specs,)), parts)
    want = gradient(tf.constant(batch.x), tf.constant(batch.kernel), lambda tensor, axis: tensor)
    np.testing.assert_allclose(compile_program(program)(batch).gradient, want, rtol=1e-5)


def test_an_images_gradient_with_windows_longer_than_parts():
    """Windows of four elements over parts of one, beside a dim with strides that is split, too."""

    def gradient(x, kernel, place):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = place(tf.nn.conv2d(place(x), kernel, [1, 2], "SAME"))
            loss = tf.reduce_sum(tf.sin(y))
        return tape.gradient(loss, x)

    def fn(batch):
        def place(tensor):
            return annotate.mesh_split(tensor, _MESH, (None, "y", "x", None))

        return NestedMap(gradient=gradient(batch.x, batch.kernel, place))

    rng = np.random.default_rng(5)
    batch = NestedMap(
        x=rng.standard_normal((1, 4, 3, 1)).astype("f"),
        kernel=rng.standard_normal((4, 1, 1, 2)).astype("f"),
    )
    specs = batch.Transform(lambda a: TensorSpec(a.shape, "float32", "____"))
    parts = Partitioning.from_dict(_MESH, {})
    program = lowering.export(AnnotatedFn("windows", fn, ("batch",), (specs,)), parts)
    want = gradient(tf.constant(batch.x), tf.constant(batch.kernel), lambda tensor: tensor)
    np.testing.assert_allclose(compile_program(program)(batch).gradient, want, 1e-4, 1e-5)
