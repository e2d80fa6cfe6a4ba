"""Convolutions and poolings split over space: halo exchange (appendix A.4)."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.sharding import windows
from lingvo_gshard.spmd import refused, topology
from tests import exhaustive
from tests.sharding import cases, windows_search
from tests.sharding.cases import Case, Input
from tests.spmd import compilers

_NUM_PARTITIONS = [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(2, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    4,
    pytest.param(8, marks=pytest.mark.slow),
]
_SIZES = (48, 37)  # Divisible by 8 after every stride; not divisible, before or after.
_WIDTH, _CHANNELS, _FILTERS = 5, 2, 3
_KERNEL = Input((3, 2, _CHANNELS, _FILTERS))


def _image(height: int) -> Input:
    return Input((2, height, _WIDTH, _CHANNELS), 1)


def _convolution(
    image: Input, kernel: Input, strides: tuple[int, int], padding: str, dilations: tuple[int, int]
) -> Case:
    """Unpartitioned, the kernel is dilated first: some CPUs have no kernel for the gradient."""

    def dilated(k: tf.Tensor) -> tf.Tensor:
        for axis, rate in enumerate(dilations):
            size = (k.shape[axis] - 1) * rate + 1
            holes = [(0, rate - 1 if i == axis + 1 else 0) for i in range(5)]
            spread = tf.pad(tf.expand_dims(k, axis + 1), holes)
            merged = tf.reshape(spread, [*k.shape[:axis], -1, *k.shape[axis + 1 :]])
            k = tf.gather(merged, range(size), axis=axis)
        return k

    return Case(
        lambda x, k: tf.nn.conv2d(x, k, strides, padding, dilations=dilations),
        (image, kernel),
        image.split,
        unpartitioned=lambda x, k: tf.nn.conv2d(x, dilated(k), strides, padding),
    )


def _convolutions(height: int) -> dict[str, Case]:
    ways = [(s, p, 1) for s in (1, 2, 3) for p in ("SAME", "VALID")]
    ways += [(1, "SAME", 2), (1, "VALID", 3)]
    return {
        f"stride {s} {p} dilation {d}, {height}": _convolution(
            _image(height), _KERNEL, (s, 1), p, (d, 1)
        )
        for s, p, d in ways
    }


def _own_convolutions(height: int) -> dict[str, Case]:
    """Split over all partitions, and with copies on some of them."""

    def own(stride: int, padding: str, dilation: int, split: cases.Split) -> Case:
        image = dataclasses.replace(_image(height), split=split)
        case = _convolution(image, _KERNEL, (stride, 1), padding, (dilation, 1))
        return dataclasses.replace(
            case,
            fn=lambda x, k: windows.convolution(x, k, (stride, 1), padding, (dilation, 1)),
        )

    def depthwise(x: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        return windows.convolution(x, tf.reshape(k, [3, 2, 1, -1]), (2, 2), "SAME")

    both = {
        f"stride {s} {p} dilation {d}, split {split}, {height}": own(s, p, d, split)
        for s, p, d, split in [(2, "SAME", 1, 1), (1, "VALID", 2, (1,)), (2, "VALID", 1, (0, 1))]
    }
    both[f"depthwise, {height}"] = Case(
        depthwise,
        (dataclasses.replace(_image(height), split=(1,)), Input((3, 2, _CHANNELS, 2))),
        (1,),
        unpartitioned=lambda x, k: tf.nn.depthwise_conv2d(x, k, (1, 2, 2, 1), "SAME"),
    )
    return both


def _transposed(height: int) -> dict[str, Case]:
    def case(stride: int, padding: str) -> Case:
        image = Input((2, height, _WIDTH, _FILTERS), 1)
        rows = height * stride + (0 if padding == "SAME" else max(3 - stride, 0))
        columns = _WIDTH + (0 if padding == "SAME" else 1)
        shape = [2, rows, columns, _CHANNELS]
        return Case(
            lambda x, k: tf.nn.conv2d_transpose(x, k, shape, (stride, 1), padding),
            (image, _KERNEL),
            1,
        )

    ways = [(s, p) for s in (1, 2, 3) for p in ("SAME", "VALID")]
    return {f"transposed, stride {s} {p}, {height}": case(s, p) for s, p in ways}


_WINDOWS = [(2, 2, "VALID"), (3, 2, "SAME"), (3, 1, "SAME"), (3, 3, "VALID"), (5, 2, "VALID")]


def _average_pooling(height: int) -> dict[str, Case]:
    def case(window: int, stride: int, padding: str) -> Case:
        return Case(
            lambda x: tf.nn.avg_pool2d(x, (window, 2), (stride, 1), padding), (_image(height),), 1
        )

    return {f"{w}/{s} {p}, {height}": case(w, s, p) for w, s, p in _WINDOWS}


def _max_pooling(height: int) -> dict[str, Case]:
    def case(window: int, stride: int, padding: str) -> Case:
        return Case(
            lambda x: windows.max_pool(x, (window, 2), (stride, 1), padding),
            (_image(height),),
            1,
            unpartitioned=lambda x: tf.nn.max_pool2d(x, (window, 2), (stride, 1), padding),
        )

    return {f"{w}/{s} {p}, {height}": case(w, s, p) for w, s, p in _WINDOWS}


def _over_both_dims(height: int) -> dict[str, Case]:
    """Rows and columns split; windows reach over corners, too."""
    both = (1, 2)
    width = height // 2
    image = Input((2, height, width, _CHANNELS), both)
    kernel = Input((3, 3, _CHANNELS, _FILTERS))

    def pooling(pool: Callable[..., tf.Tensor], window: int, stride: int, padding: str) -> Case:
        return Case(lambda x: pool(x, (window, window), (stride, stride), padding), (image,), both)

    ways = [(1, "SAME", 1), (2, "SAME", 1), (3, "VALID", 1), (1, "VALID", 2)]
    cases = {
        f"stride {s} {p} dilation {d}, {height}": _convolution(image, kernel, (s, s), p, (d, d))
        for s, p, d in ways
    }
    cases[f"transposed, {height}"] = Case(
        lambda x, k: tf.nn.conv2d_transpose(x, k, [2, 2 * height, 2 * width, _CHANNELS], 2, "SAME"),
        (Input((2, height, width, _FILTERS), both), kernel),
        both,
    )
    cases[f"average, {height}"] = pooling(tf.nn.avg_pool2d, 3, 2, "SAME")
    cases[f"largest, {height}"] = dataclasses.replace(
        pooling(windows.max_pool, 3, 2, "VALID"),
        unpartitioned=lambda x: tf.nn.max_pool2d(x, 3, 2, "VALID"),
    )
    return cases


@pytest.mark.parametrize("num_partitions", _NUM_PARTITIONS)
@pytest.mark.parametrize("group", [_convolutions, _transposed, _average_pooling, _max_pooling])
def test_partitioned_over_space_equals_unpartitioned(group, num_partitions):
    _check(group, num_partitions)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [1, *exhaustive.only(2, 4), 8])
def test_partitioned_over_both_dims_of_space_equals_unpartitioned(num_partitions):
    _check(_over_both_dims, num_partitions)


def _check(group: Callable[[int], dict[str, Case]], num_partitions: int) -> None:
    both = {name: case for height in _SIZES for name, case in group(height).items()}
    executable = cases.check(both, num_partitions)
    assert (executable.report().count("collective-permute") > 0) == (num_partitions > 1)


def _own_max_pooling(window: int, stride: int) -> dict[str, Case]:
    return {
        "pool": Case(
            lambda x: tf.nn.max_pool2d(x, (window, 2), (stride, 1), "VALID"), (_image(48),), 1
        )
    }


def test_xlas_own_max_pooling_is_right_where_no_windows_overlap(monkeypatch):
    monkeypatch.setattr(refused, "check", lambda name, graph: None)  # Its columns do overlap.
    cases.check(_own_max_pooling(2, 2), 4)


def test_xlas_own_max_pooling_has_a_wrong_gradient_where_windows_overlap(monkeypatch):
    """The reason for windows.max_pool. Once this fails, the compiler is mended: drop both."""
    with pytest.raises(ValueError, match="pool with lingvo_gshard.max_pool"):
        cases.check(_own_max_pooling(5, 2), 2)

    monkeypatch.setattr(refused, "check", lambda name, graph: None)
    with pytest.raises(AssertionError, match=r"pool: d\[0\], 2 partitions"):
        cases.check(_own_max_pooling(5, 2), 2)


def test_xlas_own_gradient_of_a_kernel_is_wrong_where_images_have_copies(monkeypatch):
    """The reason for windows.convolution. Once this fails, the compiler is mended: drop both."""
    image = dataclasses.replace(_image(16), split=(1,))
    case = {"image": Case(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), (image, _KERNEL), (1,))}
    with pytest.raises(ValueError, match="convolve with lingvo_gshard.convolution"):
        cases.check(case, 4)

    monkeypatch.setattr(refused, "check", lambda name, graph: None)
    with pytest.raises(AssertionError, match=r"image: d\[1\], 4 partitions"):
        cases.check(case, 4)


def _literal_max_pool(x, window, strides, padding, dilations):
    """A loop over all windows and their elements; the gradient of the sum of all maxima."""
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
    """Of small integers, many of which are equal: the first gets the gradient."""
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
        ([2, 2, 8, 3], {}, "a value: no window of 3 elements lies inside dim 1"),
        ([2, 8, 8, 3], {"strides": (1, 0)}, r"strides \(1, 0\) .* 2 numbers, 1 or more"),
        ([2, 8, 8, 3], {"dilations": (4, 1)}, "no window of 9 elements lies inside dim 1"),
        ([2, 8, 8, 3], {"padding": "FULL"}, "padding must be 'SAME' or 'VALID', got 'FULL'"),
    ],
)
def test_poolings_that_make_no_sense_are_refused(shape, change, message):
    arguments = {"window": (3, 3), "strides": (1, 1), "padding": "VALID", **change}
    with pytest.raises(ValueError, match=message):
        windows.max_pool(tf.zeros(shape), **arguments)


def test_dilations_of_which_tensorflow_has_a_wrong_shape_are_refused():
    x = tf.zeros([1, 5, 5, 5, 1])
    with pytest.raises(ValueError, match="expected the last two to be equal"):
        windows.convolution(x, tf.zeros([1, 1, 1, 1, 1]), (1, 1, 1), "SAME", (1, 1, 2))


@pytest.mark.parametrize(
    ("shape", "kernel", "message"),
    [
        ([2, 8, 8, 4], [3, 3, 3, 6], "the kernel's channels must divide the tensor's"),
        ([2, 8, 8, 4], [3, 3, 2, 3], "these groups its filters"),
        ([2, 2, 8, 4], [3, 3, 4, 6], "a value: no window of 3 elements lies inside dim 1"),
        ([2, 8, 8, 4], [3, 4, 6], r"window \(3,\) for a value .*; expected 2 numbers"),
        ([2, 3, 3, 3, 3, 1], [1, 1, 1, 1, 1, 1], "4 dims of space; expected 1 to 3"),
    ],
)
def test_convolutions_that_make_no_sense_are_refused(shape, kernel, message):
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


def test_pooling_of_an_unknown_size_is_refused_by_the_name_of_its_tensor():
    function = tf.function(
        lambda x: windows.max_pool(x, (2,), (1,), "SAME"),
        input_signature=[tf.TensorSpec([None, 8, 1], name="image")],
    )
    with pytest.raises(ValueError, match=r"max_pool: image:0 has shape \(None, 8, 1\); a static"):
        function.get_concrete_function()


_FIGURE_13 = {
    "divisible": [(4, 2, 3), (3, 3, 4), (1, 4, 3)],
    "stride 1, not divisible": [(1, 3, 3), (1, 5, 2), (1, 2, 4)],
    "another stride, not divisible": [(2, 3, 3), (3, 2, 2), (2, 5, 4), (3, 4, 3)],
}
_FIGURE_13_ROWS = 19  # Of the image.


def _convolution_of_dilated(stride: int, dilation: int, window: int, pads: tuple[int, int]) -> Case:
    """A convolution by XLA; unpartitioned, TensorFlow's own of an image with holes filled in."""

    def dilated(x: tf.Tensor) -> tf.Tensor:
        holes = tf.pad(x[:, :, None], [[0, 0], [0, 0], [0, dilation - 1], [0, 0], [0, 0]])
        rows = tf.reshape(holes, [x.shape[0], -1, *x.shape[2:]])
        size = (x.shape[1] - 1) * dilation + 1
        return tf.pad(rows[:, :size], [[0, 0], pads, [1, 0], [0, 0]])

    return Case(
        lambda x, k: windows_search.convolution(
            x, k, (stride, 1), (pads, (1, 0)), (dilation, 1), (1, 1), groups=1
        ),
        (_image(_FIGURE_13_ROWS), Input((window, 2, _CHANNELS, _FILTERS))),
        1,
        unpartitioned=lambda x, k: tf.nn.conv2d(dilated(x), k, (stride, 1), "VALID"),
        has_gradient=False,  # TensorFlow has none for XLA's convolution.
    )


@pytest.mark.parametrize("num_partitions", _NUM_PARTITIONS)
def test_base_dilation_in_all_cases_of_figure_13(num_partitions):
    found = set()
    convolutions = {}
    for case, ways in _FIGURE_13.items():
        for stride, dilation, window in ways:
            for pads in ((0, 0), (2, 1)):
                size = (_FIGURE_13_ROWS - 1) * dilation + 1 + sum(pads)
                count = math.ceil(((size - window) // stride + 1) / num_partitions)
                is_divisible = stride * count % dilation == 0
                found.add((is_divisible, stride == 1))
                name = f"{case}: {stride} {dilation} {window} {pads}"
                convolutions[name] = _convolution_of_dilated(stride, dilation, window, pads)
    assert {(False, True), (False, False)} <= found  # By the paper's conditions.
    assert {is_divisible for is_divisible, _ in found} == {True, False}
    cases.check(convolutions, num_partitions)


def _grouped(height: int) -> dict[str, Case]:
    """Unpartitioned, a convolution for each group: some CPUs have no gradient of groups."""

    def case(groups: int, stride: int, padding: str) -> Case:
        def each_group(x: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
            pairs = zip(tf.split(x, groups, -1), tf.split(k, groups, -1), strict=True)
            return tf.concat([tf.nn.conv2d(a, b, (stride, 1), padding) for a, b in pairs], -1)

        return Case(
            lambda x, k: windows.convolution(x, k, (stride, 1), padding),
            (Input((2, height, 3, 2 * groups), 1), Input((3, 2, 2, 3 * groups))),
            1,
            unpartitioned=each_group,
        )

    ways = [(2, 1, "SAME"), (3, 2, "VALID")]
    return {f"{g} groups, stride {s} {p}, {height}": case(g, s, p) for g, s, p in ways}


def _in_3_dims(height: int) -> dict[str, Case]:
    image = Input((2, height, 4, 3, _CHANNELS), 1)
    kernel = Input((3, 2, 2, _CHANNELS, _FILTERS))
    return {
        f"convolution, stride 1 SAME, {height}": Case(
            lambda x, k: tf.nn.conv3d(x, k, [1] * 5, "SAME"), (image, kernel), 1
        ),
        f"convolution, stride 2 VALID, {height}": Case(
            lambda x, k: tf.nn.conv3d(x, k, [1, 2, 1, 1, 1], "VALID"), (image, kernel), 1
        ),
        f"own convolution, {height}": Case(
            lambda x, k: windows.convolution(x, k, (2, 1, 1), "SAME"),
            (image, kernel),
            1,
            unpartitioned=lambda x, k: tf.nn.conv3d(x, k, [1, 2, 1, 1, 1], "SAME"),
        ),
        f"largest, {height}": Case(
            lambda x: windows.max_pool(x, (3, 2, 1), (2, 1, 1), "SAME"),
            (image,),
            1,
            unpartitioned=lambda x: tf.nn.max_pool3d(x, (3, 2, 1), (2, 1, 1), "SAME"),
        ),
    }


@pytest.mark.parametrize("num_partitions", _NUM_PARTITIONS)
@pytest.mark.parametrize(
    "group",
    [
        _grouped,
        pytest.param(_own_convolutions, marks=pytest.mark.slow),
        pytest.param(_in_3_dims, marks=pytest.mark.slow),
    ],
)
def test_groups_3_dims_of_space_and_copies(group, num_partitions):
    _check(group, num_partitions)


# TensorFlow's own convolutions must not stand in one program with images that have copies.
@pytest.mark.slow
@pytest.mark.parametrize(
    "groups", [(_convolutions, _max_pooling, _in_3_dims), (_own_convolutions,)]
)
@pytest.mark.parametrize("machine", ["v3:2x2", *exhaustive.only("h100:1x8")])
def test_accelerators_compile_them(machine, groups):
    compilers.need(machine)
    both = {}
    for group in (*groups, _grouped):
        both |= {f"{group.__name__}, {name}": case for name, case in group(37).items()}
    report = topology.compile_program(cases.exported(both, 8), machine).report()
    assert report.count("collective-permute") > 0


_IN_3_DIMS = [name for name in windows_search.OPERATORS if "3" in name]


# Each operator of the search once; the command tries more.
@pytest.mark.slow
@pytest.mark.parametrize(
    "operator",
    [
        *(name for name in windows_search.OPERATORS if name not in _IN_3_DIMS),
        *exhaustive.only(*_IN_3_DIMS),
    ],
)
def test_random_windowed_operators_are_right_or_refused(operator):
    drawn = windows_search.draw(operator, 2)
    accepted = [i for i, each in enumerate(drawn) if not windows_search.is_refused(each.case, 4)]
    if accepted:  # All others would give wrong values, or end the process.
        outcomes = windows_search.compare(operator, 2, accepted)
        assert not [outcome for outcome in outcomes if outcome.wrong]
