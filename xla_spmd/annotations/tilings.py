"""Tilings: TensorFlow's annotations, read from their text and placed along the axes of a mesh.

TensorFlow writes an annotation in GSPMD's form, a grid of device numbers. Shardy instead names the
axes of a mesh, or parts of them. On a mesh of x:2 and y:4,

    {devices=[8,1]0,1,2,3,4,5,6,7}                          dim 0 along x and y
    {devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}  dim 0 along y, copies along x
    {devices=[1,2,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}  dim 1 along the first half of y

Axes are slices of the sequence of all devices: y counts single devices, x counts fours. An order of
devices that is not made of such slices needs a separate mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_spmd.mesh import Mesh

_REPLICATED = "{replicated}"
_TILED = re.compile(
    r"\{devices=\[(?P<grid>[\d,]+)\]"
    r"(?:(?P<devices>[\d,]+)|<=\[(?P<sizes>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?)"
    r"(?P<copies> last_tile_dim_replicate)?\}"
)


@dataclasses.dataclass(frozen=True)
class SubAxis:
    """A mesh axis, or the part of one: `size` steps along it, each as long as `pre_size` allows.

    An axis of 8 divides into y:(1)2, its halves, and y:(2)4, the places in a half. `pre_size` is
    the product of all slower parts of the axis.
    """

    axis: str
    pre_size: int
    size: int
    axis_size: int

    @property
    def part(self) -> str:
        """The part of the axis in Shardy's text, `:(2)4`; empty for the whole axis."""
        return "" if self.size == self.axis_size else f":({self.pre_size}){self.size}"

    def __str__(self) -> str:
        """Returns Shardy's text."""
        return f'"{self.axis}"{self.part}'


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The division of a tensor into parts, and the devices that hold each part.

    `ways` are the numbers of parts along each dim, and `devices` lists the devices of each part, in
    row-major order of the parts. Both are empty for a tensor of any rank that every device holds.
    """

    ways: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]

    @property
    def num_devices(self) -> int:
        """The number of devices that hold a part."""
        return sum(map(len, self.devices))


@functools.cache
def parse(text: str) -> Tiling:
    """Returns the tiling of an annotation's text. Raises ValueError if it is of another kind."""
    if text == _REPLICATED:
        return Tiling((), ())
    match = _TILED.fullmatch(text)
    if match is None:
        raise ValueError(f"the annotation {text} is neither replicated nor tiled over all devices")

    if match["devices"]:
        devices = np.array(_numbers(match["devices"]))
    else:
        devices = _transposed(_numbers(match["sizes"]), _numbers(match["order"] or ""))
    return _tiling(_numbers(match["grid"]), devices, has_copies=match["copies"] is not None)


def of_proto(proto: Any) -> Tiling:
    """Returns the tiling of an OpSharding, which is replicated or tiled over all devices."""
    if not proto.tile_assignment_dimensions:
        return Tiling((), ())
    devices = np.array(proto.tile_assignment_devices)
    if not devices.size:
        devices = _transposed(tuple(proto.iota_reshape_dims), tuple(proto.iota_transpose_perm))
    grid = tuple(proto.tile_assignment_dimensions)
    return _tiling(grid, devices, has_copies=proto.replicate_on_last_tile_dim)


def _transposed(sizes: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    """Returns the devices of an annotation's short form, a transposed sequence of numbers."""
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order or None)


def _tiling(grid: tuple[int, ...], devices: np.ndarray, has_copies: bool) -> Tiling:
    """Returns the tiling over a grid of devices, whose last dim may list the copies of a part."""
    ways = grid[:-1] if has_copies else grid
    parts = np.sort(devices.reshape(math.prod(ways), -1), axis=1)
    return Tiling(ways, tuple(map(tuple, parts.tolist())))


@functools.cache
def along(tiling: Tiling, mesh: Mesh) -> tuple[tuple[SubAxis, ...], ...] | None:
    """Returns the axes that divide each dim, slowest first; None if no axes of the mesh do.

    The mesh numbers its devices in the order of its grid.
    """
    if not tiling.ways:
        return ()

    parts = np.array(tiling.devices)
    first_devices = parts[:, 0].reshape(tiling.ways)
    dims: list[tuple[SubAxis, ...]] = []
    for dim in range(len(tiling.ways)):
        # The first device of each part along this dim, relative to the first device of part 0.
        line = np.moveaxis(first_devices, dim, 0).reshape(tiling.ways[dim], -1)[:, 0]
        axes = _sub_axes(line - line[0], mesh)
        if axes is None:
            return None
        dims.append(axes)

    # The first devices alone do not determine the places of all others.
    part_of_device = np.empty(mesh.num_partitions, int)
    part_of_device[parts] = np.arange(len(parts))[:, np.newaxis]
    if not np.array_equal(part_of_device, _parts_by_axes(dims, mesh)):
        return None
    return tuple(dims)


def sliceable(dims: Sequence[tuple[SubAxis, ...]], mesh: Mesh) -> Tiling | None:
    """Returns None if XLA can slice `dims`, or else a tiling with the same numbers that it can.

    XLA slices a dim by the size of any axis, from the dim's slowest axis on, and aborts the process
    if the slowest axis has a different size: a dim along y:3 and x:2 cannot be sliced by 2. It
    slices parts by their numbers instead if their order differs from the mesh's.
    """
    if all(map(_can_be_sliced, dims)):
        return None

    listed = []
    for axes in dims:
        places = [(mesh.axis_names.index(axis.axis), axis.pre_size) for axis in axes]
        is_in_order = places == sorted(places)
        listed.append(tuple(reversed(axes)) if is_in_order else axes)
    return _of_axes(listed, mesh)


def _can_be_sliced(axes: tuple[SubAxis, ...]) -> bool:
    """Returns whether, for each pair of a dim's axes, one size divides the other."""
    sizes = [axis.size for axis in axes]
    return all(max(a, b) % min(a, b) == 0 for a, b in itertools.combinations(sizes, 2))


def _of_axes(dims: Sequence[tuple[SubAxis, ...]], mesh: Mesh) -> Tiling:
    """Returns the tiling of a tensor whose dims are divided along these axes."""
    part_of_device = _parts_by_axes(dims, mesh)
    ways = tuple(math.prod(axis.size for axis in axes) for axes in dims)
    devices = []
    for part in range(math.prod(ways)):
        devices.append(tuple(np.flatnonzero(part_of_device == part).tolist()))
    return Tiling(ways, tuple(devices))


def _sub_axes(offsets: np.ndarray, mesh: Mesh) -> tuple[SubAxis, ...] | None:
    """Returns the axes along which parts begin at these devices, slowest first, or None."""
    axes: list[SubAxis] = []
    num_parts = len(offsets)
    num_covered = 1
    while num_covered < num_parts:
        # Take the following parts as long as their distance is the same.
        stride = int(offsets[num_covered])
        size = 1
        while size * num_covered < num_parts and offsets[size * num_covered] == size * stride:
            size += 1
        if stride <= 0 or num_parts % (num_covered * size):
            return None

        divided = _divided_at_axes(stride, size, mesh)
        if divided is None:
            return None
        axes = divided + axes
        num_covered *= size
    return tuple(axes)


def _divided_at_axes(stride: int, size: int, mesh: Mesh) -> list[SubAxis] | None:
    """Returns the axes of `size` devices with `stride` between them, slowest first, or None."""
    sub_axes = []
    axis_end = mesh.num_partitions
    for name, axis_size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
        axis_stride = axis_end // axis_size
        begin = max(stride, axis_stride)
        end = min(stride * size, axis_end)
        if begin < end:
            if end % begin or begin % axis_stride or axis_end % end:
                return None
            sub_axes.append(SubAxis(name, axis_end // end, end // begin, axis_size))
        axis_end = axis_stride
    return sub_axes


def _parts_by_axes(dims: Sequence[tuple[SubAxis, ...]], mesh: Mesh) -> np.ndarray:
    """Returns the part of each device, if these axes divide the dims."""
    places = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_sizes), -1)
    parts = np.zeros(mesh.num_partitions, int)
    for axes in dims:
        for sub_axis in axes:
            place = places[mesh.axis_names.index(sub_axis.axis)]
            num_faster = sub_axis.axis_size // (sub_axis.pre_size * sub_axis.size)
            parts = parts * sub_axis.size + place // num_faster % sub_axis.size
    return parts


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
