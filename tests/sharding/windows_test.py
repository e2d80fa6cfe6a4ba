"""Convolutions and poolings split over space: halo exchange (appendix A.4)."""

import dataclasses
from collections.abc import Callable

import pytest
import tensorflow as tf

from tests.sharding import cases, windows
from tests.sharding.cases import Case, Input
from tests.sharding.windows import Padding

_NUM_PARTITIONS = [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(2, marks=pytest.mark.slow),
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
            lambda x: windows.max_pool2d(x, (window, 2), (stride, 1), Padding(padding)),
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
        pooling(lambda x, w, s, p: windows.max_pool2d(x, w, s, Padding(p)), 3, 2, "VALID"),
        unpartitioned=lambda x: tf.nn.max_pool2d(x, 3, 2, "VALID"),
    )
    return cases


@pytest.mark.parametrize("num_partitions", _NUM_PARTITIONS)
@pytest.mark.parametrize("group", [_convolutions, _transposed, _average_pooling, _max_pooling])
def test_partitioned_over_space_equals_unpartitioned(group, num_partitions):
    _check(group, num_partitions)


@pytest.mark.slow
@pytest.mark.parametrize("num_partitions", [1, 2, 4, 8])
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


def test_xlas_own_max_pooling_is_right_where_no_windows_overlap():
    cases.check(_own_max_pooling(2, 2), 4)


def test_xlas_own_max_pooling_has_a_wrong_gradient_where_windows_overlap():
    """The reason for windows.max_pool2d. Once this fails, the compiler is mended: drop it."""
    with pytest.raises(AssertionError, match=r"pool: d\[0\], 2 partitions"):
        cases.check(_own_max_pooling(5, 2), 2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([2, 8, 8], r"a static \[B, X, Y, C\] is expected, got \(2, 8, 8\)"),
        ([2, 2, 8, 3], r"no window of \(3, 3\) lies inside \(2, 8\)"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        windows.max_pool2d(tf.zeros(shape), (3, 3), (1, 1), Padding.VALID)
