"""Convolutions and poolings split over space: halo exchange (appendix A.4)."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2

from lingvo_gshard.core.tf_private import xla
from lingvo_gshard.plans import topology_executable
from lingvo_gshard.sharding import windows
from tests import exhaustive
from tests.sharding import cases
from tests.sharding.cases import Case, Input
from tests.xla_spmd import compilers

_NUM_PARTITIONS = 4
_WIDTH, _CHANNELS, _FILTERS = 5, 2, 3
_KERNEL = Input((3, 2, _CHANNELS, _FILTERS))


def _image(height: int) -> Input:
    return Input((2, height, _WIDTH, _CHANNELS), 1)


def _windows(height: int) -> dict[str, Case]:
    """Convolutions and poolings split over all partitions, and over some with copies."""

    def convolution(stride: int, padding: str, split: cases.Split) -> Case:
        return Case(
            lambda x, k: windows.convolution(x, k, (stride, 1), padding),
            (dataclasses.replace(_image(height), split=split), _KERNEL),
            split,
            unpartitioned=lambda x, k: tf.nn.conv2d(x, k, (stride, 1), padding),
        )

    def pooling(window: int, stride: int, padding: str) -> Case:
        return Case(
            lambda x: windows.max_pool(x, (window, 2), (stride, 1), padding),
            (_image(height),),
            1,
            unpartitioned=lambda x: tf.nn.max_pool2d(x, (window, 2), (stride, 1), padding),
        )

    return {
        f"convolution, strides, {height}": convolution(2, "SAME", 1),
        f"convolution, copies, {height}": convolution(1, "VALID", (1,)),
        f"convolution, two dims, {height}": convolution(2, "VALID", (0, 1)),
        f"pooling, overlapping, {height}": pooling(3, 2, "SAME"),
        f"pooling, with gaps, {height}": pooling(2, 3, "VALID"),
    }


def _literal_max_pool(x, window, strides, padding, dilations):
    """Loops over all windows and their elements; also returns the gradient of the maxima's sum."""
    spans = [(w - 1) * d + 1 for w, d in zip(window, dilations, strict=True)]
    starts = []
    for size, span, stride in zip(x.shape[1:-1], spans, strides, strict=True):
        low = 0
        count = (size - span) // stride + 1
        if padding == "SAME":
            count = math.ceil(size / stride)
            low = max((count - 1) * stride + span - size, 0) // 2
        starts.append([i * stride - low for i in range(count)])

    maxima = np.zeros([x.shape[0], *map(len, starts), x.shape[-1]], x.dtype)
    gradient = np.zeros(x.shape, x.dtype)
    for b, *place, c in np.ndindex(*maxima.shape):
        best = None
        for element in itertools.product(*map(range, window)):
            at = tuple(
                own[i] + e * d
                for own, i, e, d in zip(starts, place, element, dilations, strict=True)
            )
            if all(0 <= i < size for i, size in zip(at, x.shape[1:-1], strict=True)) and (
                best is None or x[b, *at, c] > x[b, *best, c]
            ):
                best = at
        maxima[b, *place, c] = x[b, *best, c]
        gradient[b, *best, c] += 1
    return maxima, gradient


@pytest.mark.parametrize(
    ("space", "window", "strides", "padding", "dilations"),
    [
        ((11,), (3,), (2,), "SAME", (1,)),
        ((9, 8), (3, 2), (1, 2), "VALID", (2, 1)),
        ((9, 8), (2, 3), (2, 1), "SAME", (1, 3)),
        ((4, 6, 5), (2, 3, 2), (1, 2, 1), "SAME", (1, 1, 2)),
    ],
)
def test_max_pooling_equals_a_loop_over_windows(space, window, strides, padding, dilations):
    """The inputs are small integers, many of them equal: the first one gets the gradient."""
    x = np.random.default_rng(0).integers(0, 4, (2, *space, 3)).astype(np.float32)
    variable = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(variable)
        y = windows.max_pool(variable, window, strides, padding, dilations)
    want, gradient = _literal_max_pool(x, window, strides, padding, dilations)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(tape.gradient(y, variable), gradient)


def test_max_pooling_keeps_infinities_and_integers():
    lowest = tf.fill([1, 3, 1], -np.inf)
    assert windows.max_pool(lowest, (3,), (1,), "SAME").numpy().tolist() == lowest.numpy().tolist()
    numbers = tf.constant([-9, -8, -7], shape=[1, 3, 1])
    assert tf.squeeze(windows.max_pool(numbers, (2,), (2,), "SAME")).numpy().tolist() == [-8, -7]


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        ([2, 8], {}, r"a value has shape \(2, 8\); \[batch, \*space, channels\] is expected"),
        ([2, 8, 8], {}, r"window \(3, 3\) for a value of shape .*; expected 1 numbers"),
        ([2, 8, 8, 3], {"strides": (1, 0)}, r"strides \(1, 0\) .* 2 numbers, 1 or more"),
        ([2, 8, 8, 3], {"dilations": (4, 1)}, "no window of 9 elements fits in dim 1"),
        ([2, 8, 8, 3], {"padding": "FULL"}, "padding must be 'SAME' or 'VALID', got 'FULL'"),
    ],
)
def test_wrong_arguments_of_max_pool_are_refused(shape, change, message):
    arguments = {"window": (3, 3), "strides": (1, 1), "padding": "VALID", **change}
    with pytest.raises(ValueError, match=message):
        windows.max_pool(tf.zeros(shape), **arguments)


def test_unequal_dilations_in_three_dims_are_refused():
    x = tf.zeros([1, 5, 5, 5, 1])
    with pytest.raises(ValueError, match="expected the last two to be equal"):
        windows.convolution(x, tf.zeros([1, 1, 1, 1, 1]), (1, 1, 1), "SAME", (1, 1, 2))


@pytest.mark.parametrize(
    ("shape", "kernel", "message"),
    [
        ([2, 8, 8, 4], [3, 3, 3, 6], "the kernel's channels must divide the tensor's"),
        ([2, 8, 8, 4], [3, 3, 2, 3], "these groups its filters"),
        ([2, 8, 8, 4], [3, 4, 6], r"window \(3,\) for a value .*; expected 2 numbers"),
        ([2, 3, 3, 3, 3, 1], [1, 1, 1, 1, 1, 1], "4 spatial dims; expected 1 to 3"),
    ],
)
def test_wrong_arguments_of_convolution_are_refused(shape, kernel, message):
    strides = [1] * (len(shape) - 2)
    with pytest.raises(ValueError, match=message):
        windows.convolution(tf.zeros(shape), tf.zeros(kernel), strides, "VALID")


def test_a_convolution_in_1_dim_equals_tensorflows():
    x = tf.random.stateless_normal((2, 11, 3), (0, 1))
    kernel = tf.random.stateless_normal((4, 3, 2), (0, 2))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, kernel])
        y = tf.reduce_sum(tf.sin(windows.convolution(x, kernel, (2,), "SAME")))
        want = tf.reduce_sum(tf.sin(tf.nn.conv1d(x, kernel, 2, "SAME")))
    np.testing.assert_allclose(y, want, rtol=1e-5)
    for got, expected in zip(
        tape.gradient(y, [x, kernel]), tape.gradient(want, [x, kernel]), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_an_unknown_size_is_refused_with_the_name_of_its_tensor():
    function = tf.function(
        lambda x: windows.max_pool(x, (2,), (1,), "SAME"),
        input_signature=[tf.TensorSpec([None, 8, 1], name="image")],
    )
    with pytest.raises(ValueError, match=r"max_pool: image:0 has shape \(None, 8, 1\); a static"):
        function.get_concrete_function()


def _xla_convolution(
    x: tf.Tensor,
    kernel: tf.Tensor,
    strides: Sequence[int],
    pads: Sequence[Sequence[int]],
    base_dilations: Sequence[int],
    window_dilations: Sequence[int],
    groups: int,
) -> tf.Tensor:
    """XLA's own convolution of [B, X, Y, C] with [X, Y, C / groups, D].

    `pads` are elements of the image after its dilation.
    """
    numbers = xla_data_pb2.ConvolutionDimensionNumbers(
        input_batch_dimension=0,
        input_spatial_dimensions=[1, 2],
        input_feature_dimension=3,
        kernel_spatial_dimensions=[0, 1],
        kernel_input_feature_dimension=2,
        kernel_output_feature_dimension=3,
        output_batch_dimension=0,
        output_spatial_dimensions=[1, 2],
        output_feature_dimension=3,
    )
    y = xla.conv(x, kernel, strides, pads, base_dilations, window_dilations, numbers, groups)
    sizes = []
    for i in range(2):
        padded = (x.shape[i + 1] - 1) * base_dilations[i] + 1 + sum(pads[i])
        span = (kernel.shape[i] - 1) * window_dilations[i] + 1
        sizes.append((padded - span) // strides[i] + 1)
    return tf.ensure_shape(y, [x.shape[0], *sizes, kernel.shape[-1]])


_FIGURE_13 = {
    "divisible": [(4, 2, 3), (3, 3, 4), (1, 4, 3)],
    "stride 1, not divisible": [(1, 3, 3), (1, 5, 2), (1, 2, 4)],
    "another stride, not divisible": [(2, 3, 3), (3, 2, 2), (2, 5, 4), (3, 4, 3)],
}
_FIGURE_13_ROWS = 19  # The image's number of rows.


def _convolution_of_dilated(stride: int, dilation: int, window: int, pads: tuple[int, int]) -> Case:
    """A convolution by XLA. Unpartitioned: TensorFlow's own, of an image with zeros inserted."""

    def dilated(x: tf.Tensor) -> tf.Tensor:
        holes = tf.pad(x[:, :, None], [[0, 0], [0, 0], [0, dilation - 1], [0, 0], [0, 0]])
        rows = tf.reshape(holes, [x.shape[0], -1, *x.shape[2:]])
        size = (x.shape[1] - 1) * dilation + 1
        return tf.pad(rows[:, :size], [[0, 0], pads, [1, 0], [0, 0]])

    return Case(
        lambda x, k: _xla_convolution(
            x, k, (stride, 1), (pads, (1, 0)), (dilation, 1), (1, 1), groups=1
        ),
        (_image(_FIGURE_13_ROWS), Input((window, 2, _CHANNELS, _FILTERS))),
        1,
        unpartitioned=lambda x, k: tf.nn.conv2d(dilated(x), k, (stride, 1), "VALID"),
        has_gradient=False,  # TensorFlow lacks it for XLA's convolution.
    )


@pytest.mark.slow
def test_base_dilation_in_all_cases_of_figure_13():
    found = set()
    convolutions = {}
    for case, ways in _FIGURE_13.items():
        for stride, dilation, window in ways:
            for pads in ((0, 0), (2, 1)):
                size = (_FIGURE_13_ROWS - 1) * dilation + 1 + sum(pads)
                count = math.ceil(((size - window) // stride + 1) / _NUM_PARTITIONS)
                is_divisible = stride * count % dilation == 0
                found.add((is_divisible, stride == 1))
                name = f"{case}: {stride} {dilation} {window} {pads}"
                convolutions[name] = _convolution_of_dilated(stride, dilation, window, pads)
    assert {(False, True), (False, False)} <= found  # The cases by the paper's conditions.
    assert {is_divisible for is_divisible, _ in found} == {True, False}
    cases.check(convolutions, _NUM_PARTITIONS)


@pytest.mark.slow
def test_windows_that_reach_over_partitions_equal_unpartitioned_ones():
    """tools/fuzz_programs draws more windows, strides, dilations and splits."""
    executable = cases.check(_windows(48) | _windows(37), _NUM_PARTITIONS)
    assert executable.report().count("collective-permute") > 0


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_accelerators_compile_them(machine):
    compilers.need(machine)
    program = cases.exported(_windows(37), 8)
    report = topology_executable.compile_program(program, machine).report()
    assert report.count("collective-permute") > 0
