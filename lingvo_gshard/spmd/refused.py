"""Operators that XLA's partitioner gets wrong without an error: they are refused by name.

tests/sharding/windows_search.py looks for them among all operators that slide a window. What it has
found:

- SelectAndScatter, the gradient of max pooling, is wrong where neighbors share windows.
- The gradient of a convolution's kernel is summed over all partitions. Where images have copies, it
  is too large by their number. Copies come from annotations, and from the reshapes of
  SpaceToBatchND, by which TensorFlow dilates some convolutions.
- Where images have copies, a convolution is wrong as well if its kernel is split. The paper
  replicates it.
- The gradient of a kernel with groups of channels, so that of each depthwise kernel, is also wrong
  where partitions have no window.
- That of a convolution's image ends the process if it has strides and is padded by more than its
  window reaches.
- The gradient of bilinear resizing with half pixel centers is wrong where two dims are split, or
  one has copies.

Which tensors are split, and how, is known only once XLA has propagated all annotations. So an
operator is refused wherever it stands in a program of several partitions that might be one of
these.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core.late import tf
from lingvo_gshard.spmd import jax_private

# Where the window and the strides are: in attributes, or in inputs of these numbers.
_POOL_BY_ATTRIBUTES = ("MaxPoolGrad", "MaxPool3DGrad")
_POOL_BY_INPUTS = {"MaxPoolGradV2": (3, 4), "XlaSelectAndScatter": (1, 2)}

_KERNEL_GRADIENTS = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
_DEPTHWISE_KERNEL_GRADIENT = "DepthwiseConv2dNativeBackpropFilter"
_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
_IMAGE_GRADIENTS = ("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput")
_IMAGE_GRADIENTS_3D = ("Conv3DBackpropInputV2",)
_RESIZE_GRADIENT = "ResizeBilinearGrad"

_SUSPECTS = {
    *_POOL_BY_ATTRIBUTES,
    *_POOL_BY_INPUTS,
    *_KERNEL_GRADIENTS,
    _DEPTHWISE_KERNEL_GRADIENT,
    *_CONVOLUTIONS,
    *_IMAGE_GRADIENTS,
    *_IMAGE_GRADIENTS_3D,
    _RESIZE_GRADIENT,
}

_CONVOLVE = "convolve with lingvo_gshard.convolution, whose gradient is right."


def check(name: str, graph: tf.Graph) -> None:
    """Raises ValueError, prefixed by `name`, if a partitioned `graph` could give wrong values."""
    # Most programs have none of these operators, and need no shapes.
    bodies = _bodies(graph.as_graph_def())
    if not any(node.op in _SUSPECTS for node in itertools.chain(*bodies)):
        return

    bodies = _bodies(graph.as_graph_def(add_shapes=True))
    makes_copies = _what_makes_copies(bodies)
    for nodes in bodies:
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            what = f"{name}: {node.name} ({node.op})"
            _check_pooling(what, node, by_name)
            _check_kernel_gradient(what, node, by_name, makes_copies)
            _check_kernel(what, node, by_name, makes_copies)
            _check_image_gradient(what, node, by_name)
            if node.op == _RESIZE_GRADIENT and node.attr["half_pixel_centers"].b:
                raise ValueError(
                    f"{what}, the gradient of a bilinear resizing, is wrong in some ways of "
                    "splitting it, since XLA's partitioner has an error there; multiply by a "
                    "matrix of weights for each dim of space, as tf.einsum does."
                )


def _bodies(proto: Any) -> list[Sequence[Any]]:
    """Returns the NodeDefs of a GraphDef, and those of each of its functions.

    The bodies of loops and conditionals are functions of their own.
    """
    return [proto.node, *(function.node_def for function in proto.library.function)]


def _check_pooling(what: str, node: Any, by_name: Mapping[str, Any]) -> None:
    """Refuses a NodeDef that is the gradient of a pooling with windows that overlap."""
    window: list[int] | None
    strides: list[int] | None
    if node.op in _POOL_BY_ATTRIBUTES:
        window = list(node.attr["ksize"].list.i)
        strides = list(node.attr["strides"].list.i)
    elif node.op in _POOL_BY_INPUTS:
        window_input, strides_input = _POOL_BY_INPUTS[node.op]
        window = _constant(node.input[window_input], by_name)
        strides = _constant(node.input[strides_input], by_name)
    else:
        return

    # What is known only when it runs may be anything.
    if window is not None and strides is not None:
        if all(w <= s for w, s in zip(window, strides, strict=True)):
            return
    raise ValueError(
        f"{what}, the gradient of a max pooling with windows {window} and strides {strides}, is "
        "wrong where a dim in which windows overlap is split, since XLA's partitioner has an error "
        "there; pool with lingvo_gshard.max_pool, whose gradient is right."
    )


def _check_kernel_gradient(
    what: str, node: Any, by_name: Mapping[str, Any], makes_copies: str
) -> None:
    """Refuses a NodeDef that is the gradient of a kernel with groups, or beside copies."""
    if _has_groups(node, by_name):
        raise ValueError(
            f"{what}, the gradient of a kernel with groups of channels, is wrong where some "
            f"partitions have no window, since XLA's partitioner has an error there; {_CONVOLVE}"
        )
    if node.op in _KERNEL_GRADIENTS and makes_copies:
        raise ValueError(
            f"{what}, the gradient of a convolution's kernel, is too large where images have "
            f"copies, as {makes_copies} makes them, since XLA's partitioner has an error there; "
            f"{_CONVOLVE}"
        )


def _has_groups(node: Any, by_name: Mapping[str, Any]) -> bool:
    """Returns whether a NodeDef is the gradient of a kernel that has, or may have, groups."""
    if node.op == _DEPTHWISE_KERNEL_GRADIENT:
        return True
    if node.op not in _KERNEL_GRADIENTS:
        return False

    # A kernel without groups has all channels of the image.
    image = by_name.get(node.input[0].split(":")[0])
    if image is None:
        return True
    is_last = node.attr["data_format"].s in (b"NHWC", b"NDHWC")
    image_shape = _shape(image)
    kernel_shape = _shape(node)
    if not image_shape or not kernel_shape:
        return True
    return image_shape[-1 if is_last else 1] != kernel_shape[-2]


def _shape(node: Any) -> list[int]:
    """Returns the sizes of the first output of a NodeDef, -1 if unknown; none if its rank is."""
    return [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim]


def _check_kernel(what: str, node: Any, by_name: Mapping[str, Any], makes_copies: str) -> None:
    """Refuses a NodeDef that is a convolution whose kernel may be split, if images have copies."""
    if not makes_copies or node.op not in (
        *_CONVOLUTIONS,
        *_IMAGE_GRADIENTS,
        *_IMAGE_GRADIENTS_3D,
    ):
        return

    kernel = by_name.get(node.input[1].split(":")[0])
    if kernel is not None and kernel.op == "XlaSharding":
        kind, _ = jax_private.hlo_sharding(kernel.attr["sharding"].s)
        if kind == "replicated":
            return
    raise ValueError(
        f"{what} is wrong if its kernel is split and images have copies, as {makes_copies} makes "
        "them, since XLA's partitioner has an error there; give it lingvo_gshard.replicate(kernel)."
    )


def _check_image_gradient(what: str, node: Any, by_name: Mapping[str, Any]) -> None:
    """Refuses a NodeDef that is the gradient of an image, which has more pads than it can."""
    if node.op not in _IMAGE_GRADIENTS or node.attr["padding"].s != b"EXPLICIT":
        return
    kernel = by_name.get(node.input[1].split(":")[0])
    if kernel is None or node.attr["data_format"].s != b"NHWC":
        return

    window = _shape(kernel)[:2]
    pads = node.attr["explicit_paddings"].list.i
    strides = node.attr["strides"].list.i
    dilations = node.attr["dilations"].list.i
    for i, length in enumerate(window):
        low = pads[2 * i + 2]
        if strides[i + 1] > 1 and low > (length - 1) * dilations[i + 1]:
            raise ValueError(
                f"{what}, the gradient of a convolution with strides {list(strides)}, has "
                f"{low} elements of padding before a window of {length}, where XLA's partitioner "
                "has an error; pad with tf.pad, and convolve with padding='VALID'."
            )


def _what_makes_copies(bodies: Sequence[Sequence[Any]]) -> str:
    """Returns the name of an operation that may leave copies on some partitions, or nothing."""
    for nodes in bodies:
        for node in nodes:
            if node.op == "SpaceToBatchND":
                return node.name
            if node.op == "XlaSharding":
                kind, sharding = jax_private.hlo_sharding(node.attr["sharding"].s)
                if kind == "other" and sharding.replicate_on_last_tile_dim():
                    return node.name
    return ""


def _constant(tensor: str, by_name: Mapping[str, Any]) -> list[int] | None:
    """Returns the numbers of a constant input; None if it is none."""
    node = by_name.get(tensor.split(":")[0])
    if node is None or node.op != "Const":
        return None
    return tf.make_ndarray(node.attr["value"].tensor).tolist()
