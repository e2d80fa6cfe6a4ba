"""Operators on images, [batch, *space, channels]: convolutions, pooling, resizing."""

import itertools

from tools.fuzz_programs.draft import Draft, Tensor
from tools.fuzz_programs.registry import Call, NoOperands, family

# The layout by the number of spatial dims; TensorFlow's eager gradients require it.
LAYOUTS = {1: "NWC", 2: "NHWC", 3: "NDHWC"}


def _image(draft: Draft, num_dims: int) -> Tensor:
    """Returns an image with this many spatial dims; it may be a new argument."""

    def is_small(tensor: Tensor) -> bool:
        return 0 < tensor.size <= 2000 and tensor.shape[-1] <= 16

    rank = num_dims + 2
    try:
        return draft.pick(min_rank=rank, max_rank=rank, where=is_small)
    except NoOperands:
        shape = [draft.rng.choice((1, 2, 3, 5, 8)), *[0] * num_dims, draft.rng.choice((1, 2, 3, 4))]
        for i in range(num_dims):
            shape[i + 1] = draft.rng.choice((3, 4, 5, 7, 8, 9))
        return draft.add_argument(shape, "float32")


def _window(draft: Draft, image: Tensor) -> list[int]:
    return [draft.rng.randint(1, min(4, size)) for size in image.shape[1:-1]]


@family(
    {
        "convolution": "gshard.convolution({0}, {1}, {strides}, '{padding}', {dilations}) * 0.3",
        "tf_convolution": (
            "tf.nn.convolution({0}, {1}, {strides}, '{padding}', dilations={dilations}, "
            "data_format='{layout}') * 0.3"
        ),
    },
    weight=1.5,
)
def convolution(draft: Draft) -> Call:
    num_dims = draft.rng.choice((1, 2, 2, 3))
    image = _image(draft, num_dims)
    window = _window(draft, image)
    channels = image.shape[-1]
    groups = draft.rng.choice((1, 1, 1, channels))
    filters = groups * draft.rng.randint(1, 3)
    kernel = draft.like([*window, channels // groups, filters], image.dtype)

    strides = [draft.rng.choice((1, 1, 2, 3)) for _ in window]
    dilations = [1] * num_dims
    if max(strides) == 1 and num_dims < 3 and draft.chance(0.3):
        dilations = [draft.rng.choice((1, 2)) for _ in window]
    for size, length, dilation in zip(image.shape[1:-1], window, dilations, strict=True):
        if (length - 1) * dilation + 1 > size:
            raise NoOperands
    padding = draft.rng.choice(("SAME", "VALID"))
    attributes = {"strides": strides, "padding": padding, "dilations": dilations}
    return Call([image, kernel], {**attributes, "layout": LAYOUTS[num_dims]})


@family(
    {"conv_transpose": ("tf.nn.conv2d_transpose({0}, {1}, {shape}, {strides}, '{padding}') * 0.3")},
    weight=0.5,
)
def conv_transpose(draft: Draft) -> Call:
    image = _image(draft, 2)
    window = [draft.rng.randint(1, 4), draft.rng.randint(1, 4)]
    strides = [draft.rng.choice((1, 2, 3)), draft.rng.choice((1, 2, 3))]
    padding = draft.rng.choice(("SAME", "VALID"))

    # The shape of an image whose convolution has the shape of this one.
    space = []
    for size, stride, length in zip(image.shape[1:-1], strides, window, strict=True):
        is_same = padding == "SAME"
        space.append(size * stride if is_same else (size - 1) * stride + length)

    filters = draft.rng.randint(1, 3)
    kernel = draft.like([*window, filters, image.shape[-1]], image.dtype)
    shape = [image.shape[0], *space, filters]
    return Call([image, kernel], {"shape": shape, "strides": strides, "padding": padding})


@family(
    {
        "max_pool": "gshard.max_pool({0}, {window}, {strides}, '{padding}')",
        "average_pool": (
            "tf.nn.pool({0}, {window}, 'AVG', strides={strides}, padding='{padding}', "
            "data_format='{layout}')"
        ),
        "tf_max_pool": (
            "tf.nn.pool({0}, {window}, 'MAX', strides={strides}, padding='{padding}', "
            "data_format='{layout}')"
        ),
    },
    weight=1.0,
)
def pooling(draft: Draft) -> Call:
    image = _image(draft, draft.rng.choice((1, 2, 2, 3)))
    window = _window(draft, image)
    strides = [draft.rng.choice((1, 2, 3)) for _ in window]
    padding = draft.rng.choice(("SAME", "VALID"))
    attributes = {"window": window, "strides": strides, "padding": padding}
    return Call([image], {**attributes, "layout": LAYOUTS[len(window)]})


@family(
    {
        "depthwise": (
            "tf.nn.depthwise_conv2d({0}, {1}, [1, {stride}, {stride}, 1], '{padding}') * 0.3"
        )
    },
    weight=0.3,
)
def depthwise(draft: Draft) -> Call:
    image = _image(draft, 2)
    window = _window(draft, image)
    kernel = draft.like([*window, image.shape[-1], draft.rng.randint(1, 2)], image.dtype)
    padding = draft.rng.choice(("SAME", "VALID"))
    return Call([image, kernel], {"stride": draft.rng.choice((1, 2)), "padding": padding})


@family(
    {
        "nearest": (
            "tf.compat.v1.image.resize_nearest_neighbor(tf.stop_gradient({0}), {space}, "
            "align_corners=True)"
        ),
        "nearest_centers": "tf.image.resize(tf.stop_gradient({0}), {space}, 'nearest')",
        "bilinear": "tf.compat.v1.image.resize_bilinear({0}, {space}, align_corners=True)",
        "bilinear_centers": "tf.image.resize({0}, {space})",
        "patches": (
            "tf.image.extract_patches({0}, [1, 2, 3, 1], [1, 2, 1, 1], [1, 1, 1, 1], 'SAME')"
        ),
        "space_to_batch": "tf.space_to_batch({0}, [2, 2], {even})",
    },
    weight=0.8,
)
def resizing(draft: Draft) -> Call:
    image = _image(draft, 2)
    sizes = image.shape[1:-1]
    space = [draft.rng.choice((size, 2 * size, size + 1)) for size in sizes]
    even = [[0, size % 2] for size in sizes]
    return Call([image], {"space": space, "even": even})


@family(
    {
        "space_to_depth": "tf.nn.space_to_depth({0}, 2)",
        "depth_to_space": "tf.nn.depth_to_space({0}, 2)",
    },
    weight=0.3,
)
def depth(draft: Draft) -> Call:
    sizes = itertools.product((2, 4, 6, 10), repeat=2)
    rows, columns = draft.rng.choice(list(sizes))
    shape = [draft.rng.choice((1, 3, 8)), rows, columns, draft.rng.choice((4, 8))]
    return Call([draft.like(shape, "float32")])
