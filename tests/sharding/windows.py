"""Max pooling whose gradient may be split over space (appendix A.4)."""

import enum
import itertools

import tensorflow as tf


class Padding(enum.Enum):
    """Whether windows may reach beyond the edges."""

    SAME = "SAME"
    VALID = "VALID"


def max_pool2d(
    x_BXYC: tf.Tensor, window: tuple[int, int], strides: tuple[int, int], padding: Padding
) -> tf.Tensor:
    """The maximum of every window, [B, X', Y', C], as tf.nn.max_pool2d.

    The gradient consists of slices, which are partitioned by halo exchange. The gradient of
    tf.nn.max_pool2d is XLA's SelectAndScatter, which today's partitioner gets wrong if windows
    overlap. The first of several equal elements gets the gradient.

    `x_BXYC` holds floats, [batch, X, Y, channels], and has a static shape. `window` and `strides`
    are sizes along X and Y. SAME padding gives ceil(size / stride) windows, VALID those that lie
    inside. Raises ValueError if the shape is another, or if no window lies inside.
    """
    if not x_BXYC.shape.is_fully_defined() or x_BXYC.shape.rank != 4:
        raise ValueError(f"max_pool2d: a static [B, X, Y, C] is expected, got {x_BXYC.shape}.")
    sizes = x_BXYC.shape.as_list()[1:3]
    counts, pads = [], []
    for size, length, stride in zip(sizes, window, strides, strict=True):
        same = padding is Padding.SAME
        counts.append(-(-size // stride) if same else (size - length) // stride + 1)
        over = max((counts[-1] - 1) * stride + length - size, 0) if same else 0
        pads.append([over // 2, over - over // 2])
    if min(counts) < 1:
        raise ValueError(f"max_pool2d: no window of {window} lies inside {tuple(sizes)}.")
    padded = tf.pad(x_BXYC, [[0, 0], *pads, [0, 0]], constant_values=x_BXYC.dtype.min)
    largest = None
    for x, y in itertools.product(range(window[0]), range(window[1])):
        # Element (x, y) of every window.
        last_x, last_y = (
            start + (count - 1) * stride + 1
            for start, count, stride in zip((x, y), counts, strides, strict=True)
        )
        element = padded[:, x : last_x : strides[0], y : last_y : strides[1]]
        largest = element if largest is None else tf.maximum(largest, element)
    return largest
