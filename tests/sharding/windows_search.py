"""Looks for windowed operators that XLA's partitioner gets wrong (appendix A.4).

python -m tests.sharding.windows_search --programs=12

Every operator of TensorFlow that slides a window and that XLA compiles, with random sizes, windows,
strides, paddings, dilations and groups, is split over one or two random dims of space, or over the
batch and one of them. Its values and gradients are compared with those of one device. The table
counts by operator what was tried, what the library refuses, what was wrong, and where XLA ended the
process.
"""

from lingvo_gshard.spmd import environment

environment.prepare(num_devices=8)

import argparse  # noqa: E402
import concurrent.futures  # noqa: E402
import dataclasses  # noqa: E402
import math  # noqa: E402
import multiprocessing  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from unittest import mock  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.compiler.xla import xla_data_pb2  # noqa: E402

from lingvo_gshard.core.nested_map import NestedMap  # noqa: E402
from lingvo_gshard.core.tf_private import xla  # noqa: E402
from lingvo_gshard.files import table  # noqa: E402
from lingvo_gshard.sharding import windows  # noqa: E402
from lingvo_gshard.spmd import annotated_fn, refused  # noqa: E402
from lingvo_gshard.spmd.executable import compile_program  # noqa: E402
from tests.sharding import cases  # noqa: E402
from tests.sharding.cases import Case, Input, Split  # noqa: E402

_CASES_OF_A_PROGRAM = 8
_NUM_PARTITIONS = (2, 4, 8)
_BATCH = 2
_CHANNELS = 2


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A random case, and the numbers that it was made of."""

    text: str
    case: Case


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case: whether tracing refuses it, and what was wrong if it did not."""

    text: str
    num_partitions: int
    is_refused: bool
    # The share of wrong elements by result: y, d[0], d[1], ...: without those that are right.
    wrong: Mapping[str, float]
    is_crash: bool = False


class Draw:
    """Random numbers, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def one(self, *choices):
        return choices[self._rng.integers(len(choices))]

    def number(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return int(self._rng.integers(low, high + 1))

    def numbers(self, count: int, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.number(low, high) for _ in range(count))

    def pads(self, count: int, high: int) -> list[list[int]]:
        return [list(self.numbers(2, 0, high)) for _ in range(count)]

    def space(self, rank: int) -> tuple[tuple[int, ...], list[int]]:
        """Sizes, and the dims that are split, one or two.

        What is split is long, and seldom divisible; the rest is short, so that programs are small.
        """
        num_split = self.one(1, 1, 2)
        split = sorted(self._rng.permutation(rank)[:num_split].tolist())
        sizes = [self.number(4, 7) for _ in range(rank)]
        for dim in split:
            sizes[dim] = self.number(9, 40)
        return tuple(sizes), split


@dataclasses.dataclass(frozen=True)
class Window:
    """An image, [batch, *space, channels], and the window that slides over it."""

    space: tuple[int, ...]
    split: Split
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: str

    @property
    def rank(self) -> int:
        return len(self.space)

    def image(self, channels: int = _CHANNELS) -> Input:
        return Input((_BATCH, *self.space, channels), self.split)

    def kernel(self, *channels: int) -> Input:
        return Input((*self.sizes, *channels))

    def drawn(self, fn: Callable[..., tf.Tensor], *inputs: Input, text: str = "") -> Drawn:
        return Drawn(f"{self} {text}", Case(fn, inputs, self.split))


def _image_split(draw: Draw, split: Sequence[int]) -> Split:
    """The dims of space, behind the batch.

    Instead of a second one the batch may be split, or what is split may have copies.
    """
    first = split[0] + 1
    if len(split) == 2:
        return first, split[1] + 1
    return draw.one(first, first, (first,), (0, first))


def _split(draw: Draw, split: Sequence[int]) -> Split:
    """The dims of space, without a batch."""
    first = split[0]
    if len(split) == 2:
        return first, split[1]
    return draw.one(first, first, (first,))


def _window(draw: Draw, rank: int, largest: int = 4, equal: bool = False) -> Window:
    """A window that lies inside the image. If `equal`, strides are, and so are dilations."""
    space, split = draw.space(rank)
    sizes = list(draw.numbers(rank, 1, largest))
    strides = draw.numbers(rank, 1, 3)
    dilations = (1,) * rank

    # TensorFlow has no strides beside dilations.
    if draw.one(True, False, False):
        strides = (1,) * rank
        dilations = draw.numbers(rank, 1, 3)
    if equal:
        strides = strides[:1] * rank
        dilations = dilations[:1] * rank

    for i in range(rank):
        if (sizes[i] - 1) * dilations[i] >= space[i]:
            sizes[i] = 1
    padding = draw.one("SAME", "VALID")
    return Window(space, _image_split(draw, split), tuple(sizes), strides, dilations, padding)


def _undilated(draw: Draw, rank: int) -> Window:
    return dataclasses.replace(_window(draw, rank), dilations=(1,) * rank)


def _explicit(draw: Draw, padding: str, rank: int) -> str | list[list[int]]:
    """`padding`, or numbers of elements."""
    if rank != 2 or draw.one(True, True, False):
        return padding
    return [[0, 0], *draw.pads(rank, 3), [0, 0]]


def _convolution(draw: Draw, rank: int) -> Drawn:
    window = _window(draw, rank)
    channels = draw.one(1, 2)
    groups = draw.one(1, 1, 2, 3)
    padding = _explicit(draw, window.padding, rank)
    if rank == 2:
        convolve = tf.nn.conv2d
    else:
        convolve = tf.nn.convolution
    return window.drawn(
        lambda x, k: convolve(x, k, window.strides, padding, dilations=window.dilations),
        window.image(channels * groups),
        window.kernel(channels, 2 * groups),
        text=f"{padding}, {groups} groups of {channels}",
    )


def _transposed(draw: Draw, rank: int) -> Drawn:
    window = _undilated(draw, rank)
    sizes = []
    for size, stride, length in zip(window.space, window.strides, window.sizes, strict=True):
        beyond = max(length - stride, 0) if window.padding == "VALID" else 0
        sizes.append(size * stride + beyond)
    shape = [_BATCH, *sizes, 3]
    return window.drawn(
        lambda x, k: tf.nn.conv_transpose(x, k, shape, window.strides, window.padding),
        window.image(),
        window.kernel(3, _CHANNELS),
    )


def _depthwise(draw: Draw) -> Drawn:
    window = _window(draw, 2, equal=True)
    padding = window.padding
    if window.dilations == (1, 1):
        padding = _explicit(draw, padding, 2)
    strides = (1, *window.strides, 1)
    return window.drawn(
        lambda x, k: tf.nn.depthwise_conv2d(x, k, strides, padding, dilations=window.dilations),
        window.image(3),
        window.kernel(3, 2),
        text=f"{padding}",
    )


def _separable(draw: Draw) -> Drawn:
    window = _window(draw, 2, equal=True)
    strides = (1, *window.strides, 1)
    return window.drawn(
        lambda x, k, p: tf.nn.separable_conv2d(
            x, k, p, strides, window.padding, dilations=window.dilations
        ),
        window.image(3),
        window.kernel(3, 2),
        Input((1, 1, 6, 2)),
    )


_POOLS = {
    "MAX": (tf.nn.max_pool1d, tf.nn.max_pool2d, tf.nn.max_pool3d),
    "AVG": (tf.nn.avg_pool1d, tf.nn.avg_pool2d, tf.nn.avg_pool3d),
}


def _pool(draw: Draw, rank: int, kind: str) -> Drawn:
    window = _undilated(draw, rank)
    pool = _POOLS[kind][rank - 1]
    return window.drawn(
        lambda x: pool(x, window.sizes, window.strides, window.padding), window.image()
    )


def _disjoint_max_pool(draw: Draw, rank: int) -> Drawn:
    """Windows that do not overlap; there may be gaps between them."""
    window = _undilated(draw, rank)
    strides = tuple(map(max, window.strides, window.sizes))
    window = dataclasses.replace(window, strides=strides)
    pool = _POOLS["MAX"][rank - 1]
    return window.drawn(
        lambda x: pool(x, window.sizes, window.strides, window.padding), window.image()
    )


def _own_max_pool(draw: Draw, rank: int) -> Drawn:
    window = _window(draw, rank)
    return window.drawn(
        lambda x: windows.max_pool(
            x, window.sizes, window.strides, window.padding, window.dilations
        ),
        window.image(),
    )


def _own_convolution(draw: Draw, rank: int) -> Drawn:
    window = _window(draw, rank, equal=rank == 3)
    channels = draw.one(2, 2, 1)
    groups = draw.one(1, 1, 2, 3)
    return window.drawn(
        lambda x, k: windows.convolution(x, k, window.strides, window.padding, window.dilations),
        window.image(channels * groups),
        window.kernel(channels, 2 * groups),
        text=f"{groups} groups of {channels}",
    )


def _dilated_pool(draw: Draw, kind: str) -> Drawn:
    """tf.nn.pool moves dilated windows to the batch, and has neither strides nor SAME for them."""
    window = _window(draw, 2)
    strides = tuple(map(min, window.strides, window.sizes))
    padding = "VALID" if max(window.dilations) > 1 else window.padding
    window = dataclasses.replace(window, strides=strides, padding=padding)
    return window.drawn(
        lambda x: tf.nn.pool(
            x,
            window.sizes,
            kind,
            strides=window.strides,
            padding=window.padding,
            dilations=window.dilations,
        ),
        window.image(),
    )


def _max_pool_v2(draw: Draw) -> Drawn:
    window = _undilated(draw, 2)
    return window.drawn(
        lambda x: tf.raw_ops.MaxPoolV2(
            input=x,
            ksize=[1, *window.sizes, 1],
            strides=[1, *window.strides, 1],
            padding=window.padding,
        ),
        window.image(),
    )


def _without_gradient(drawn: Drawn) -> Drawn:
    """TensorFlow has no gradient for this operator, or XLA has not compiled it."""
    return Drawn(drawn.text, dataclasses.replace(drawn.case, has_gradient=False))


def _scan(draw: Draw, operator: Callable[..., tf.Tensor]) -> Drawn:
    """A running sum is a window from the beginning."""
    space, split = draw.space(2)
    axis = draw.one(0, 1)
    is_exclusive = draw.one(True, False)
    is_reversed = draw.one(True, False)
    place = _split(draw, split)
    return Drawn(
        f"{space}, split {place}, axis {axis}, exclusive {is_exclusive}, reverse {is_reversed}",
        Case(
            lambda x: operator(x, axis, exclusive=is_exclusive, reverse=is_reversed),
            (Input(space, place),),
            place,
        ),
    )


def _on_image(draw: Draw, text: str, image: Input, fn: Callable[[tf.Tensor], tf.Tensor]) -> Drawn:
    return Drawn(f"{image}, {text}", Case(fn, (image,), image.split))


def _image(draw: Draw, channels: int = _CHANNELS, batch: int = _BATCH, multiple: int = 1) -> Input:
    space, split = draw.space(2)
    rounded = tuple(size - size % multiple for size in space)
    return Input((batch, *rounded, channels), _image_split(draw, split))


def _bilinear(draw: Draw) -> Drawn:
    image = _image(draw)
    size = [draw.number(max(2, n // 3), 3 * n) for n in image.shape[1:3]]
    return _on_image(draw, f"to {size}", image, lambda x: tf.image.resize(x, size, "bilinear"))


def _bilinear_corners(draw: Draw) -> Drawn:
    image = _image(draw)
    size = [draw.number(max(2, n // 3), 3 * n) for n in image.shape[1:3]]
    return _on_image(
        draw,
        f"to {size}",
        image,
        lambda x: tf.compat.v1.image.resize_bilinear(x, size, align_corners=True),
    )


def _nearest(draw: Draw) -> Drawn:
    image = _image(draw)
    size = [draw.number(max(2, n // 3), 3 * n) for n in image.shape[1:3]]
    return _without_gradient(
        _on_image(draw, f"to {size}", image, lambda x: tf.image.resize(x, size, "nearest"))
    )


def _patches(draw: Draw) -> Drawn:
    window = _window(draw, 2)
    return window.drawn(
        lambda x: tf.image.extract_patches(
            x,
            [1, *window.sizes, 1],
            [1, *window.strides, 1],
            [1, *window.dilations, 1],
            window.padding,
        ),
        window.image(),
    )


def _space_to_batch(draw: Draw) -> Drawn:
    image = _image(draw)
    block = draw.numbers(2, 1, 3)
    pads = []
    for size, length in zip(image.shape[1:3], block, strict=True):
        low = draw.number(0, 2)
        pads.append([low, -(size + low) % length])
    return _on_image(
        draw, f"block {block}, {pads}", image, lambda x: tf.space_to_batch(x, block, pads)
    )


def _batch_to_space(draw: Draw) -> Drawn:
    block = draw.numbers(2, 1, 3)
    crops = [[draw.number(0, 2), draw.number(0, 1)] for _ in block]
    image = _image(draw, batch=_BATCH * math.prod(block))
    return _on_image(
        draw, f"block {block}, {crops}", image, lambda x: tf.batch_to_space(x, block, crops)
    )


def _depth_to_space(draw: Draw) -> Drawn:
    block = draw.number(2, 3)
    image = _image(draw, channels=_CHANNELS * block**2)
    return _on_image(draw, f"block {block}", image, lambda x: tf.nn.depth_to_space(x, block))


def _space_to_depth(draw: Draw) -> Drawn:
    block = draw.number(2, 3)
    image = _image(draw, multiple=block)
    return _on_image(draw, f"block {block}", image, lambda x: tf.nn.space_to_depth(x, block))


def _response_normalization(draw: Draw) -> Drawn:
    """The window slides over channels."""
    radius = draw.number(1, 4)
    image = Input((2, 3, 4, draw.number(9, 30)), 3)
    return _on_image(
        draw, f"radius {radius}", image, lambda x: tf.nn.local_response_normalization(x, radius)
    )


def _mirror_pad(draw: Draw) -> Drawn:
    image = _image(draw)
    mode = draw.one("REFLECT", "SYMMETRIC")
    pads = [[0, 0], *draw.pads(2, 3), [0, 0]]
    return _on_image(draw, f"{pads}, {mode}", image, lambda x: tf.pad(x, pads, mode))


def _frames(draw: Draw) -> Drawn:
    signal = Input((2, draw.number(20, 60)), 1)
    length = draw.number(2, 7)
    step = draw.number(1, 5)
    return _on_image(draw, f"{length}/{step}", signal, lambda x: tf.signal.frame(x, length, step))


def _overlap_and_add(draw: Draw) -> Drawn:
    length = draw.number(2, 7)
    step = draw.number(1, length)
    frames = Input((2, draw.number(9, 30), length), 1)
    return _on_image(draw, f"step {step}", frames, lambda x: tf.signal.overlap_and_add(x, step))


def _xla_convolution(draw: Draw) -> Drawn:
    """All that a convolution of XLA may have at once, base dilation with strides included."""
    window = _window(draw, 2)
    window = dataclasses.replace(window, strides=draw.numbers(2, 1, 3))
    base = draw.numbers(2, 1, 4)
    pads = draw.pads(2, 4)
    groups = draw.one(1, 2)
    drawn = window.drawn(
        lambda x, k: convolution(x, k, window.strides, pads, base, window.dilations, groups),
        window.image(2 * groups),
        window.kernel(2, 3 * groups),
        text=f"base dilation {base}, {pads}, {groups} groups",
    )
    return _without_gradient(drawn)


def convolution(
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


def _binary(fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., tf.Tensor]:
    """`fn` of two scalars, as XLA's operators take it."""
    scalar = tf.TensorSpec([], tf.float32)
    return tf.function(fn).get_concrete_function(scalar, scalar)


def _xla_reduce_window(draw: Draw) -> Drawn:
    space, split = draw.space(2)
    place = _split(draw, split)
    sizes = draw.numbers(2, 1, 4)
    strides = draw.numbers(2, 1, 3)
    base = draw.numbers(2, 1, 2)
    dilations = draw.numbers(2, 1, 2)
    pads = draw.pads(2, 3)

    counts = []
    for i, size in enumerate(space):
        padded = (size - 1) * base[i] + 1 + sum(pads[i])
        counts.append((padded - (sizes[i] - 1) * dilations[i] - 1) // strides[i] + 1)

    def fn(x: tf.Tensor) -> tf.Tensor:
        add = _binary(lambda a, b: a + b)
        y = xla.reduce_window(x, 0.0, add, sizes, strides, base, dilations, pads)
        return tf.ensure_shape(y, counts)

    text = f"{space}, split {place}, {sizes}, {strides}, {base}, {dilations}, {pads}"
    return _without_gradient(Drawn(text, Case(fn, (Input(space, place),), place)))


def _select_and_scatter(draw: Draw) -> Drawn:
    space, split = draw.space(2)
    place = _split(draw, split)
    sizes = draw.numbers(2, 1, 4)
    strides = draw.numbers(2, 1, 4)
    counts = [(n - w) // s + 1 for n, w, s in zip(space, sizes, strides, strict=True)]

    def fn(x: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
        y = xla.gen_xla_ops.xla_select_and_scatter(
            operand=x,
            window_dimensions=tf.constant(sizes),
            window_strides=tf.constant(strides),
            padding=tf.zeros([2, 2], tf.int32),
            source=source,
            init_value=tf.constant(0.0),
            select=_binary(lambda a, b: a >= b),
            scatter=_binary(lambda a, b: a + b),
        )
        return tf.ensure_shape(y, space)

    inputs = (Input(space, place), Input(tuple(counts), place))
    text = f"{space}, split {place}, {sizes}, {strides}"
    return _without_gradient(Drawn(text, Case(fn, inputs, place)))


OPERATORS: Mapping[str, Callable[[Draw], Drawn]] = {
    "conv1d": lambda draw: _convolution(draw, 1),
    "conv2d": lambda draw: _convolution(draw, 2),
    "conv3d": lambda draw: _convolution(draw, 3),
    "conv1d_transpose": lambda draw: _transposed(draw, 1),
    "conv2d_transpose": lambda draw: _transposed(draw, 2),
    "conv3d_transpose": lambda draw: _transposed(draw, 3),
    "depthwise_conv2d": _depthwise,
    "separable_conv2d": _separable,
    "max_pool1d": lambda draw: _pool(draw, 1, "MAX"),
    "max_pool2d": lambda draw: _pool(draw, 2, "MAX"),
    "max_pool3d": lambda draw: _pool(draw, 3, "MAX"),
    "max_pool1d, disjoint": lambda draw: _disjoint_max_pool(draw, 1),
    "max_pool2d, disjoint": lambda draw: _disjoint_max_pool(draw, 2),
    "max_pool3d, disjoint": lambda draw: _disjoint_max_pool(draw, 3),
    "MaxPoolV2": _max_pool_v2,
    "XlaSelectAndScatter": _select_and_scatter,
    "windows.max_pool, 1-D": lambda draw: _own_max_pool(draw, 1),
    "windows.max_pool, 2-D": lambda draw: _own_max_pool(draw, 2),
    "windows.max_pool, 3-D": lambda draw: _own_max_pool(draw, 3),
    "windows.convolution, 1-D": lambda draw: _own_convolution(draw, 1),
    "windows.convolution, 2-D": lambda draw: _own_convolution(draw, 2),
    "windows.convolution, 3-D": lambda draw: _own_convolution(draw, 3),
    "avg_pool1d": lambda draw: _pool(draw, 1, "AVG"),
    "avg_pool2d": lambda draw: _pool(draw, 2, "AVG"),
    "avg_pool3d": lambda draw: _pool(draw, 3, "AVG"),
    "pool MAX": lambda draw: _dilated_pool(draw, "MAX"),
    "pool AVG": lambda draw: _dilated_pool(draw, "AVG"),
    "cumsum": lambda draw: _scan(draw, tf.cumsum),
    "cumprod": lambda draw: _scan(draw, tf.math.cumprod),
    "cumulative_logsumexp": lambda draw: _scan(draw, tf.math.cumulative_logsumexp),
    "resize, bilinear": _bilinear,
    "resize, bilinear, corners": _bilinear_corners,
    "resize, nearest": _nearest,
    "extract_patches": _patches,
    "space_to_batch": _space_to_batch,
    "batch_to_space": _batch_to_space,
    "space_to_depth": _space_to_depth,
    "depth_to_space": _depth_to_space,
    "local_response_normalization": _response_normalization,
    "mirror_pad": _mirror_pad,
    "signal.frame": _frames,
    "signal.overlap_and_add": _overlap_and_add,
    "XlaConv": _xla_convolution,
    "XlaReduceWindow": _xla_reduce_window,
}


def draw(operator: str, seed: int) -> list[Drawn]:
    """Returns the random cases of a seed."""
    random = Draw(seed)
    return [OPERATORS[operator](random) for _ in range(_CASES_OF_A_PROGRAM)]


def search(operator: str, seed: int) -> list[Outcome]:
    """Returns the outcomes of the cases of a seed, as if nothing were refused.

    They are computed in a child, since a failed check of XLA's ends the process.
    """
    try:
        return _in_child(operator, seed, range(_CASES_OF_A_PROGRAM))
    except concurrent.futures.process.BrokenProcessPool:
        pass

    # One of the cases did that.
    outcomes: list[Outcome] = []
    for index, drawn in enumerate(draw(operator, seed)):
        try:
            outcomes += _in_child(operator, seed, [index])
        except concurrent.futures.process.BrokenProcessPool:
            num_partitions = _partitions_of(seed)
            refusal = is_refused(drawn.case, num_partitions)
            outcomes.append(Outcome(drawn.text, num_partitions, refusal, {}, is_crash=True))
    return outcomes


def _in_child(operator: str, seed: int, indices: Sequence[int]) -> list[Outcome]:
    # TensorFlow and JAX are imported here, but have not started: a fork is safe, and quick.
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, context) as child:
        return child.submit(compare, operator, seed, indices).result()


def _partitions_of(seed: int) -> int:
    return _NUM_PARTITIONS[seed % len(_NUM_PARTITIONS)]


def compare(operator: str, seed: int, indices: Sequence[int]) -> list[Outcome]:
    """Returns the outcomes of some cases of a seed, in this process."""
    num_partitions = _partitions_of(seed)
    all_drawn = draw(operator, seed)
    chosen = {f"case {i}": all_drawn[i] for i in indices}
    fns = {name: drawn.case for name, drawn in chosen.items()}

    want = _values(fns, 1)
    got = _values(fns, num_partitions)
    outcomes: list[Outcome] = []
    for name, drawn in chosen.items():
        wrong = {}
        pairs = zip(got[name].FlattenItems(), want[name].Flatten(), strict=True)
        for (path, value), expected in pairs:
            share = _share_of_wrong(np.asarray(value), np.asarray(expected))
            if share > 0:
                wrong[path] = round(share, 3)
        refusal = is_refused(drawn.case, num_partitions)
        outcomes.append(Outcome(drawn.text, num_partitions, refusal, wrong))
    return outcomes


def _values(fns: Mapping[str, Case], num_partitions: int) -> NestedMap:
    with mock.patch.object(refused, "check"):
        program = cases.exported(fns, num_partitions)
    return compile_program(program)(cases.arrays(fns))


def is_refused(case: Case, num_partitions: int) -> bool:
    """Returns whether the library refuses to trace a case."""
    fns = {"case": case}
    try:
        annotated_fn.trace(cases.annotated(fns, num_partitions), cases.flat(num_partitions))
    except ValueError as error:
        assert "XLA's partitioner" in str(error)
        return True
    return False


def _share_of_wrong(value: np.ndarray, expected: np.ndarray) -> float:
    scale = max(1.0, float(np.abs(expected).max()))
    return float(np.mean(~np.isclose(value, expected, rtol=1e-3, atol=1e-3 * scale)))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=12, help="of 8 cases, for each operator")
    parser.add_argument("--operators", default="", help="separated by semicolons; all if empty")
    parser.add_argument("--first_seed", type=int, default=0, help="of the first program")
    arguments = parser.parse_args()
    names = arguments.operators.split(";") if arguments.operators else list(OPERATORS)

    header = ("operator", "tried", "refused", "wrong", "crashed", "bad, not refused")
    rows: list[tuple] = [header]
    for name in names:
        outcomes: list[Outcome] = []
        for program in range(arguments.programs):
            outcomes += search(name, arguments.first_seed + program)

        unnoticed = 0
        for outcome in outcomes:
            if (outcome.wrong or outcome.is_crash) and not outcome.is_refused:
                print(f"{name}: {outcome}", flush=True)
                unnoticed += 1
        num_refused = sum(outcome.is_refused for outcome in outcomes)
        num_wrong = sum(bool(outcome.wrong) for outcome in outcomes)
        num_crashed = sum(outcome.is_crash for outcome in outcomes)
        rows.append((name, len(outcomes), num_refused, num_wrong, num_crashed, unnoticed))
        print(rows[-1], file=sys.stderr, flush=True)
    print(table.text(rows))


if __name__ == "__main__":
    _main()
