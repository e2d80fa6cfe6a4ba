"""Operators that slide a window and that XLA's partitioner gets wrong: dims are kept whole there.

XLA's partitioner gives some convolutions and poolings wrong values, or ends the process:

- The gradient of a kernel is a convolution of two images. Where both are split along space and have
  copies, its sum over the devices counts each copy. With more windows than the image has strides,
  as explicit padding gives, elements are lost. With groups of channels, it is right only if nothing
  but the batch is split, and over all devices.
- A convolution is wrong if its image is split along space, and its kernel is split as well.
- A convolution with groups is wrong if the devices split channels.
- Where the summed channels are split and have copies, the sum over the devices may count each copy.
- The gradient of maximum pooling is wrong along a dim in which windows overlap.
- A convolution is wrong, or ends in an error, along a dim of space with fewer elements than parts
  of the image or of the result.
- A convolution of a dilated image whose ends are cut off ends the process. So does one whose
  windows reach farther than a part along another dim.

Such dims are kept whole, only where the propagated placements split them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_spmd import stablehlo
from xla_spmd.repairs import placements
from xla_spmd.repairs.placements import Placement
from xla_spmd.runtime import jax_private
from xla_spmd.runtime.jax_private import ir

_CONVOLUTION = "stablehlo.convolution"
_POOLING_GRADIENT = "stablehlo.select_and_scatter"
OPERATORS = frozenset([_CONVOLUTION, _POOLING_GRADIENT])


@dataclasses.dataclass
class _Whole:
    """The dims that an operator's operands and its result must not split."""

    operands: list[set[int]]
    result: set[int]


def repair(operation: Any, places: Sequence[Placement], num_devices: int) -> bool:
    """Makes dims whole that one of OPERATORS must not split; returns whether any was split."""
    wholes = []
    for place in places:
        if operation.name == _CONVOLUTION:
            wholes.append(_of_convolution(operation, place, num_devices))
        else:
            wholes.append(_of_pooling_gradient(operation))

    is_split = False
    for number, operand in enumerate(operation.operands):
        dims = set[int]().union(*(whole.operands[number] for whole in wholes))
        splits = [place.operands[number] for place in places]
        if any(split.ways[dim] > 1 for split in splits for dim in dims):
            operation.operands[number] = placements.unsplit(operand, dims, splits)
            is_split = True

    dims = set[int]().union(*(whole.result for whole in wholes))
    splits = [place.results[0] for place in places]
    if any(split.ways[dim] > 1 for split in splits for dim in dims):
        placements.unsplit_result(operation, dims, splits)
        is_split = True
    return is_split


def _of_pooling_gradient(operation: Any) -> _Whole:
    """Windows that overlap send elements to places of other partitions."""
    rank = len(stablehlo.shape(operation.operands[0]))
    sizes = _of_each_dim(operation, "window_dimensions", rank)
    strides = _of_each_dim(operation, "window_strides", rank)
    dims = {dim for dim, size in enumerate(sizes) if size > strides[dim]}
    # The image, the gradient of the windows' maxima, and a scalar.
    return _Whole([dims, dims, set()], dims)


def _of_convolution(operation: Any, place: Placement, num_devices: int) -> _Whole:
    numbers = jax_private.dimension_numbers(operation.attributes["dimension_numbers"])
    image_ways, kernel_ways = (split.ways for split in place.operands)
    image_space = list(numbers.input_spatial_dimensions)
    kernel_space = list(numbers.kernel_spatial_dimensions)
    result_space = list(numbers.output_spatial_dimensions)
    all_dims = set(range(len(image_ways)))

    # The gradient of a kernel with groups, whose sum is over the rows of a batch.
    if _count(operation, "batch_group_count") > 1:
        has_rows_alone = (
            image_ways[numbers.input_feature_dimension] == num_devices
            and kernel_ways[numbers.kernel_input_feature_dimension] == num_devices
        )
        summed = set() if has_rows_alone else all_dims
        return _Whole([summed, summed], all_dims)

    whole = _Whole([set(), set()], set())
    has_groups = _count(operation, "feature_group_count") > 1
    if has_groups:
        whole.operands[0].add(numbers.input_feature_dimension)
        whole.operands[1].update(all_dims)
        whole.result.add(numbers.output_feature_dimension)

    # A kernel that is split along space is an image, too: the result is a kernel's gradient.
    if any(kernel_ways[dim] > 1 for dim in kernel_space):
        has_copies = math.prod(image_ways) < num_devices or math.prod(kernel_ways) < num_devices
        has_few = _has_few(operation.operands[0], image_ways, image_space)
        has_few |= _has_few(operation.operands[1], kernel_ways, kernel_space)
        has_more = _has_more_windows(operation, image_space, kernel_space)
        if has_copies or has_groups or has_few or has_more:
            whole.operands[0].update(image_space)
            whole.operands[1].update(kernel_space)
    elif any(image_ways[dim] > 1 for dim in image_space):
        whole.operands[1].update(all_dims)

    channels = numbers.input_feature_dimension
    kernel_channels = numbers.kernel_input_feature_dimension
    num_parts = max(image_ways[channels], kernel_ways[kernel_channels])
    if 1 < num_parts < num_devices:
        whole.operands[0].add(channels)
        whole.operands[1].add(kernel_channels)

    far = _far_windows(operation, place)
    for i, dim in enumerate(image_space):
        result_dim = result_space[i]
        result_ways = place.results[0].ways
        # XLA also splits a whole image as the result is split.
        image_size = stablehlo.shape(operation.operands[0])[dim]
        has_few = image_size < max(image_ways[dim], result_ways[result_dim])
        has_few |= _has_few(operation.results[0], result_ways, [result_dim])
        if has_few or _cuts_off(operation, i) or i in far:
            whole.operands[0].add(dim)
            whole.result.add(result_dim)
    return whole


def _has_more_windows(
    convolution: Any, image_space: Sequence[int], kernel_space: Sequence[int]
) -> bool:
    """Returns whether a kernel's gradient has more windows than its image has strides.

    The convolution's kernel is then the gradient of the windows, dilated by the strides. Explicit
    padding of a window or more gives so many.
    """
    strides = _of_each_dim(convolution, "rhs_dilation", len(image_space))
    image = stablehlo.shape(convolution.operands[0])
    windows = stablehlo.shape(convolution.operands[1])
    for i, (image_dim, window_dim) in enumerate(zip(image_space, kernel_space, strict=True)):
        if windows[window_dim] > -(-image[image_dim] // strides[i]):
            return True
    return False


def _far_windows(convolution: Any, place: Placement) -> set[int]:
    """Returns the dims of space whose windows reach farther than a part of a dilated image.

    A dim counts if the image is dilated and split along another dim. XLA fails if windows reach
    beyond the adjacent part, too; here they may not reach so far.
    """
    numbers = jax_private.dimension_numbers(convolution.attributes["dimension_numbers"])
    image, kernel = map(stablehlo.shape, convolution.operands)
    rank = len(numbers.input_spatial_dimensions)
    image_dilations = _of_each_dim(convolution, "lhs_dilation", rank)
    window_dilations = _of_each_dim(convolution, "rhs_dilation", rank)

    far = set()
    dilated = set()
    for i, dim in enumerate(numbers.input_spatial_dimensions):
        result_dim = numbers.output_spatial_dimensions[i]
        num_parts = max(place.operands[0].ways[dim], place.results[0].ways[result_dim])
        window = kernel[numbers.kernel_spatial_dimensions[i]]
        reach = (window - 1) * window_dilations[i]
        if num_parts > 1 and reach > -(-image[dim] // num_parts):
            far.add(i)
        if num_parts > 1 and image_dilations[i] > 1:
            dilated.add(i)
    return {i for i in far if dilated - {i}}


def _has_few(value: Any, ways: Sequence[int], dims: Sequence[int]) -> bool:
    """Returns whether one of these dims has fewer elements than parts."""
    sizes = stablehlo.shape(value)
    return any(sizes[dim] < ways[dim] for dim in dims)


def _of_each_dim(operation: Any, name: str, rank: int) -> list[int]:
    """Returns an attribute's number for each dim; StableHLO may omit the attribute if all are 1."""
    if name not in operation.attributes:
        return [1] * rank
    return list(ir.DenseI64ArrayAttr(operation.attributes[name]))


def _count(convolution: Any, name: str) -> int:
    """Returns a number of groups, of channels or of rows."""
    count: int = ir.IntegerAttr(convolution.attributes[name]).value
    return count


def _cuts_off(convolution: Any, space_dim: int) -> bool:
    """Returns whether a convolution's image is dilated along a dim, and its ends are cut off."""
    attributes = convolution.attributes
    if "padding" not in attributes:
        return False
    padding = np.array(ir.DenseIntElementsAttr(attributes["padding"])).reshape(-1, 2)
    dilations = _of_each_dim(convolution, "lhs_dilation", len(padding))
    return bool(dilations[space_dim] > 1 and padding[space_dim].min() < 0)
