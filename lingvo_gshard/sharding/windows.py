"""Max pooling and convolution with gradients made of slices and pads (A.4).

XLA's partitioner makes mistakes in the gradients of TensorFlow's own operators. The library's
repairs keep dims whole (xla_spmd/repairs/window_parts.py), so an image must be gathered from all
devices. The two functions here need no repair.

The gradient of max pooling is XLA's SelectAndScatter. Where neighboring partitions share windows,
elements are lost and misplaced. `max_pool` takes maxima of slices instead.

The gradient of a convolution's kernel is a convolution of two images. If the images are split along
one mesh axis and replicated along another, the copies are summed as well: the gradient is too large
by the number of copies. `convolution` sums products of slices instead. With such images, the kernel
must not be split either: `convolution` replicates it.

Slices, and their gradients (pads), are partitioned by halo exchange if the devices divide all
sizes; xla_spmd/repairs/whole_dims.py keeps other sizes whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lingvo_gshard.core.late import tf
from lingvo_gshard.sharding.annotate import replicate, static_shape
from xla_spmd import checks

Padding = Literal["SAME", "VALID"]


def max_pool(
    tensor: tf.Tensor,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int] | None = None,
) -> tf.Tensor:
    """Returns the maximum of every window, as tf.nn.pool does; its gradient can be partitioned.

    `tensor` is [batch, *space, channels], numeric, with a static shape. `window`, `strides` and
    `dilations` (default: 1) have a number for each spatial dim. A window spans
    (window - 1) * dilation + 1 elements. SAME padding gives ceil(size / stride) windows, VALID
    only the windows inside the tensor.

    The result has the tensor's dtype and shape [batch, *windows, channels]. The gradient of a
    window goes to its largest element, or to the first in row-major order if several are equal.

    Raises ValueError for a shape or padding that is not one of these, if `window`, `strides` or
    `dilations` has the wrong length or a number below 1, and if no window fits.
    """
    dilations = _checked("max_pool", tensor, window, strides, padding, dilations)

    # The maximum of a window is the maximum of its rows' maxima. We start with the last dim, so
    # that the first of equal elements in row-major order wins here as well.
    pooled = tensor
    for i in reversed(range(len(window))):
        what = f"max_pool: {_name(tensor)}"
        windows = _windows(what, tensor, i + 1, window[i], strides[i], padding, dilations[i])
        pooled = _pooled_along(pooled, windows)
    return pooled


def convolution(
    tensor: tf.Tensor,
    kernel: tf.Tensor,
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int] | None = None,
) -> tf.Tensor:
    """Returns the convolution, as tf.nn.convolution does; its gradients can be partitioned.

    `tensor` is [batch, *space, channels] with 1 to 3 spatial dims, and `kernel` is [*window,
    channels of a group, filters]. Both have the same floating-point dtype and static shapes.
    `strides` and `dilations` (default: 1) have a number for each spatial dim. The kernel's shape
    determines the number of groups; with one group per channel, the convolution is depthwise.

    The result is [batch, *windows, filters]. The kernel is replicated, as in the paper, so its
    gradient may be split in any way.

    Raises ValueError for the same conditions as max_pool, for more than 3 spatial dims, for a
    third dilation that differs from the second, and if the groups do not divide the channels or the
    filters.
    """
    window = static_shape(f"convolution: {_name(kernel)}", kernel.shape)[:-2]
    dilations = _checked("convolution", tensor, window, strides, padding, dilations)
    _check_convolution(tensor, kernel, dilations)

    # TensorFlow's operators need two or three spatial dims.
    if len(window) == 1:
        rows = convolution(tensor[:, None], kernel[None], (1, *strides), padding, (1, *dilations))
        return rows[:, 0]

    along: list[_Windows] = []
    for i, length in enumerate(window):
        what = f"convolution: {_name(tensor)}"
        windows = _windows(what, tensor, i + 1, length, strides[i], padding, dilations[i])
        along.append(windows)
    settings = {
        "strides": [1, *strides, 1],
        "padding": padding,
        "dilations": [1, *dilations, 1],
    }
    return _convolved(tensor, kernel, along, settings)


def _check_convolution(tensor: tf.Tensor, kernel: tf.Tensor, dilations: Sequence[int]) -> None:
    """Raises ValueError for incompatible channels, spatial dims or dilations."""
    shape = tensor.shape.as_list()
    num_dims = len(dilations)
    groups, remainder = divmod(shape[-1], kernel.shape[-2])
    if remainder or kernel.shape[-1] % max(groups, 1):
        raise ValueError(
            f"convolution: {_name(tensor)} of shape {shape} and a kernel of shape {kernel.shape}: "
            "the kernel's channels must divide the tensor's, and these groups its filters."
        )
    if num_dims > 3:
        raise ValueError(
            f"convolution: {_name(tensor)} has {num_dims} spatial dims; expected 1 to 3."
        )

    if num_dims == 3 and dilations[1] != dilations[2]:
        # TensorFlow confuses these two dilations when it infers the result's shape.
        raise ValueError(
            f"convolution: dilations {tuple(dilations)} for {_name(tensor)} of shape {shape}; "
            "for three spatial dims, expected the last two to be equal."
        )


def _convolved(
    tensor: tf.Tensor,
    kernel: tf.Tensor,
    along: Sequence[_Windows],
    settings: Mapping[str, Any],
) -> tf.Tensor:
    """Returns a convolution in two or three spatial dims, with custom gradients."""
    shape = tensor.shape.as_list()

    @tf.custom_gradient
    def convolved(
        tensor: tf.Tensor, kernel: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
        whole = _replicated(kernel)
        if len(along) == 2:
            result = tf.raw_ops.Conv2D(input=tensor, filter=whole, **settings)
            backward = tf.raw_ops.Conv2DBackpropInput
        else:
            result = tf.raw_ops.Conv3D(input=tensor, filter=whole, **settings)
            backward = tf.raw_ops.Conv3DBackpropInputV2

        def gradients(d_result: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            d_tensor = backward(
                input_sizes=shape,
                filter=_replicated(kernel),  # Again, because a loop passes only the kernel.
                out_backprop=d_result,
                **settings,
            )
            return d_tensor, _kernel_gradient(tensor, d_result, along, kernel.shape)

        return result, gradients

    return convolved(tensor, kernel)


@dataclasses.dataclass(frozen=True)
class _Windows:
    """The windows along one axis of a tensor."""

    axis: int
    num_windows: int
    stride: int
    # The numbers of elements that SAME adds at the start and the end.
    pads: tuple[int, int]
    # The elements of the first window.
    first: range

    def element(self, padded: tf.Tensor, first: int) -> tf.Tensor:
        """Returns one element of every window: the one at index `first` in the first window."""
        last = first + (self.num_windows - 1) * self.stride
        slices = [slice(None)] * padded.shape.rank
        slices[self.axis] = slice(first, last + 1, self.stride)
        return padded[tuple(slices)]


def _windows(
    what: str,
    tensor: tf.Tensor,
    axis: int,
    length: int,
    stride: int,
    padding: Padding,
    dilation: int,
) -> _Windows:
    """Returns the windows along an axis.

    Raises ValueError, prefixed by `what`, if no window fits.
    """
    size = tensor.shape[axis]
    span = (length - 1) * dilation + 1
    if padding == "SAME":
        num_windows = math.ceil(size / stride)
        missing = max((num_windows - 1) * stride + span - size, 0)
    else:
        num_windows = (size - span) // stride + 1
        missing = 0
    if num_windows < 1:
        raise ValueError(
            f"{what}: no window of {span} elements fits in dim {axis} of shape {tensor.shape}."
        )
    # Like TensorFlow, SAME pads more at the end.
    pads = (missing // 2, missing - missing // 2)
    return _Windows(axis, num_windows, stride, pads, range(0, span, dilation))


def _pooled_along(tensor: tf.Tensor, windows: _Windows) -> tf.Tensor:
    """Returns each window's maximum along one axis."""
    pads = [(0, 0)] * tensor.shape.rank
    pads[windows.axis] = windows.pads
    lowest = -math.inf if tensor.dtype.is_floating else tensor.dtype.min
    padded = tf.pad(tensor, pads, constant_values=lowest)

    elements = [windows.element(padded, first) for first in windows.first]
    return functools.reduce(tf.maximum, elements)


def _kernel_gradient(
    tensor: tf.Tensor, d_result: tf.Tensor, along: Sequence[_Windows], shape: tf.TensorShape
) -> tf.Tensor:
    """Returns the gradient of a kernel of this shape."""
    padded = tf.pad(tensor, [(0, 0), *[windows.pads for windows in along], (0, 0)])
    groups = tensor.shape[-1] // shape[-2]
    d_grouped = _grouped(d_result, groups)

    # Each element of the kernel has met one element of each window.
    space = "XYZ"[: len(along)]
    gradients = []
    for place in itertools.product(*[windows.first for windows in along]):
        met = padded
        for windows, first in zip(along, place, strict=True):
            met = windows.element(met, first)
        product = tf.einsum(f"B{space}GC,B{space}GF->CGF", _grouped(met, groups), d_grouped)
        gradients.append(tf.reshape(product, shape[-2:]))
    return tf.reshape(tf.stack(gradients), shape)


def _replicated(kernel: tf.Tensor) -> tf.Tensor:
    """Annotates a kernel as whole, unless it is an eager value, which is always whole."""
    return replicate(kernel) if tf.is_symbolic_tensor(kernel) else kernel


def _grouped(tensor: tf.Tensor, groups: int) -> tf.Tensor:
    """Returns [..., channels] as [..., groups, channels of a group]."""
    return tf.reshape(tensor, [*tensor.shape[:-1], groups, -1])


def _checked(
    what: str,
    tensor: tf.Tensor,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int] | None,
) -> Sequence[int]:
    """Returns the dilations.

    Raises ValueError, prefixed by `what`, for invalid arguments.
    """
    shape = static_shape(f"{what}: {_name(tensor)}", tensor.shape)
    rank = len(shape) - 2
    if rank < 1:
        raise ValueError(
            f"{what}: {_name(tensor)} has shape {shape}; [batch, *space, channels] is expected."
        )

    if dilations is None:
        dilations = [1] * rank
    for name, numbers in (("window", window), ("strides", strides), ("dilations", dilations)):
        checks.check_type(f"{what}: {name}", numbers, Sequence, f"{rank} numbers")
        if len(numbers) != rank or min(numbers) < 1:
            raise ValueError(
                f"{what}: {name} {tuple(numbers)} for {_name(tensor)} of shape {shape}; expected "
                f"{rank} numbers, 1 or more."
            )

    if padding not in ("SAME", "VALID"):
        raise ValueError(f"{what}: padding must be 'SAME' or 'VALID', got {padding!r}.")
    return dilations


def _name(tensor: tf.Tensor) -> str:
    """Returns the name of a tensor in a traced function, or a placeholder for an eager value."""
    return tensor.name if tf.is_symbolic_tensor(tensor) else "a value"
