"""Fingerprints of arrays: 64 bits for each expert, computed on the devices that hold the array.

A fingerprint is the sum, modulo 2**32, of a hash of each element's bits and its position in its
expert. The sums of parts add up to the sum of the whole. So the fingerprint does not depend on the
partitioning, and each device hashes only its own part. Fingerprints detect elements that were
changed, moved or lost; they do not detect forgery.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.spmd import padded
from lingvo_gshard.spmd.executable import ONE_AT_A_TIME
from lingvo_gshard.spmd.padded import PaddedArray

# Hashing takes a few times as much memory as the part. A part fits in the cache of a CPU, which
# makes hashing faster.
_PART_BYTES = 4 * 2**20
_SEEDS = (0x9E3779B9, 0x7F4A7C15)  # Two independent sums make 64 bits.

_Array = TypeVar("_Array", jax.Array, np.ndarray)

# NumPy hashes about so many elements in the time that tracing and compiling a program takes.
_ELEMENTS_ON_HOST = 2**20


def fingerprint(array: jax.Array | PaddedArray, dims: str) -> list[str]:
    """Returns 16 hex digits for each expert, or for the whole array without a dim E.

    `dims` has a letter for each dim, as in TensorSpec. All processes must call it.
    """
    on_devices = padded.on_devices(array)
    assert isinstance(on_devices.sharding, NamedSharding)
    if _is_small_on_host(on_devices):
        values = padded.without_padding(np.asarray(on_devices), array.shape)
        return _digits(_sums_on_host(values, dims.upper().find("E")))

    if on_devices.sharding.mesh.size == 1 and on_devices.nbytes > _PART_BYTES:
        return _of_parts(on_devices, dims)

    program = _program(dims.upper().find("E"), array.shape, on_devices.sharding.mesh)
    with ONE_AT_A_TIME:  # With collectives, two programs at once could deadlock.
        return _digits(np.asarray(program(on_devices)))


def _digits(sums: np.ndarray) -> list[str]:
    """Returns the 16 hex digits of each row of uint32 [E, 2]."""
    return [f"{high:08x}{low:08x}" for high, low in sums.tolist()]


def _is_small_on_host(array: jax.Array) -> bool:
    """Returns whether an array is small and completely in this process's host memory."""
    platforms = {device.platform for device in array.devices()}
    is_here = array.is_fully_addressable and platforms == {"cpu"}
    return is_here and array.size <= _ELEMENTS_ON_HOST


def _sums_on_host(x: np.ndarray, expert_axis: int) -> np.ndarray:
    """Computes `_sums_of_part` of a whole array by NumPy."""
    by_expert = x[None] if expert_axis < 0 else np.moveaxis(x, expert_axis, 0)
    rows = np.ascontiguousarray(by_expert).reshape(len(by_expert), -1)
    bits = rows.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint32)

    position = np.arange(bits.shape[1], dtype=np.uint32)
    sums = []
    for seed in _SEEDS:
        hashes = _mixed(bits ^ _mixed(position + np.uint32(seed)))
        sums.append(hashes.sum(axis=1, dtype=np.uint32))
    return np.stack(sums, axis=1)


def of_values(values: np.ndarray, dims: str) -> list[str]:
    """Returns the `fingerprint` of an array in this process's memory."""
    if values.size <= _ELEMENTS_ON_HOST:
        return _digits(_sums_on_host(values, dims.upper().find("E")))
    return _of_parts(values, dims)


def _of_parts(array: jax.Array | np.ndarray, dims: str) -> list[str]:
    """Returns the fingerprint of an array, whose temporary arrays have the size of a part."""
    axis = int(np.argmax(array.shape))
    size = array.shape[axis]
    rows = max(1, _PART_BYTES * size // array.nbytes)

    sums = PartSums(dims, array.shape)
    begin = [0] * array.ndim
    for start in range(0, size, rows):
        begin[axis] = start
        count = min(rows, size - start)
        if isinstance(array, np.ndarray):
            in_memory = array[(*[slice(None)] * axis, slice(start, start + count))]
            sums.add(tuple(begin), in_memory)
        else:
            # The start is an argument, so that all parts of a size share a program.
            on_device = jax.lax.dynamic_slice_in_dim(array, start, count, axis)
            sums.add(tuple(begin), on_device)
    return sums.fingerprint()


class PartSums:
    """Computes an array's fingerprint from its parts, which need not be in memory together."""

    def __init__(self, dims: str, shape: tuple[int, ...]) -> None:
        """`dims` has a letter for each dim of the whole array, whose shape is `shape`."""
        self._expert_axis = dims.upper().find("E")
        self._strides = _strides(shape, self._expert_axis)
        num_experts = shape[self._expert_axis] if self._expert_axis >= 0 else 1
        self._sums = np.zeros((num_experts, len(_SEEDS)), np.uint32)

    def add(self, begin: tuple[int, ...], part: np.ndarray | jax.Array) -> None:
        """Adds a part whose first element has the index `begin`; parts must not overlap."""
        experts = slice(None)
        if self._expert_axis >= 0:
            start = begin[self._expert_axis]
            experts = slice(start, start + part.shape[self._expert_axis])

        # The position of the part's first element within its expert.
        first = sum(index * stride for index, stride in zip(begin, self._strides, strict=True))
        strides = tuple(stride % 2**32 for stride in self._strides)
        sums = _sums_of_part(part, strides, np.uint32(first % 2**32), self._expert_axis)
        self._sums[experts] += np.asarray(sums)  # Modulo 2**32.

    def fingerprint(self) -> list[str]:
        """Returns the fingerprint of the array, once all its parts were added."""
        return _digits(self._sums)


def difference(
    name: str, saved: Sequence[str], computed: Sequence[str], experts: slice = slice(None)
) -> str:
    """Describes the experts of the array `name` whose fingerprints differ; "" if they are equal.

    `saved` has the fingerprints of all experts, and `computed` has only the fingerprints of the
    range `experts`: with slice(2, 4), computed[0] is compared with saved[2].
    """
    indices = range(len(saved))[experts]
    differing = [
        expert
        for expert, fingerprint_now in zip(indices, computed, strict=True)
        if fingerprint_now != saved[expert]
    ]
    return f"{name} is not what was saved, in experts {differing}" if differing else ""


@functools.cache
def _program(
    expert_axis: int, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> Callable[[jax.Array], jax.Array]:
    """Returns the compiled sums of whole arrays, uint32 [E, 2], which all of a shape share.

    An array may be larger than `shape`; its padding is not hashed.
    """
    strides = tuple(stride % 2**32 for stride in _strides(shape, expert_axis))

    def sums(x: jax.Array) -> jax.Array:
        return _sums_of_part(padded.without_padding(x, shape), strides, np.uint32(0), expert_axis)

    return jax.jit(sums, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _strides(shape: tuple[int, ...], expert_axis: int) -> tuple[int, ...]:
    """Returns how far an element and its neighbor along each axis are apart in their expert.

    Elements are in row-major order, whichever axis the experts have. The stride of that axis is 0.
    """
    within_expert = list(shape)
    if expert_axis >= 0:
        within_expert[expert_axis] = 1
    strides = [math.prod(within_expert[axis + 1 :]) for axis in range(len(shape))]
    if expert_axis >= 0:
        strides[expert_axis] = 0
    return tuple(strides)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _sums_of_part(
    part: jax.Array, strides: tuple[int, ...], first: np.uint32, expert_axis: int
) -> jax.Array:
    """Returns the sums of a part's hashes for each of its experts and each seed, uint32 [E, 2].

    An element's position in its expert is `first` plus its index times `strides`. The stride of the
    experts' axis is 0. If `expert_axis` is -1, the array counts as one expert.
    """
    position = jnp.full(part.shape, first, jnp.uint32)
    for axis, stride in enumerate(strides):
        index = jax.lax.broadcasted_iota(jnp.uint32, part.shape, axis)
        position += index * jnp.uint32(stride)
    if expert_axis < 0:
        return _hashed(part[None], position[None])
    return _hashed(jnp.moveaxis(part, expert_axis, 0), jnp.moveaxis(position, expert_axis, 0))


def _hashed(by_expert: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the sums of the hashes of each expert's elements, given their positions in it."""
    # The bits are hashed, so that -0.0 differs from 0.0, and NaN equals itself.
    unsigned = jnp.dtype(f"uint{8 * by_expert.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(by_expert, unsigned).astype(jnp.uint32)

    within_expert = tuple(range(1, by_expert.ndim))
    sums = []
    for seed in _SEEDS:
        hashes = _mixed(bits ^ _mixed(position + jnp.uint32(seed)))
        sums.append(jnp.sum(hashes, within_expert, dtype=jnp.uint32))
    return jnp.stack(sums, axis=1)


def _mixed(x: _Array) -> _Array:
    """Applies MurmurHash3's finalizer: a bijection in which each bit depends on all 32 bits."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
