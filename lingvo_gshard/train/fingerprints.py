"""Fingerprints of arrays that lie on many devices: one for each expert, whatever the partitioning.

A fingerprint is a sum, modulo 2**32, over an expert's elements of a hash of each one's bits and
place. Sums of parts add up to the sum of the whole, so the devices compute it where the array
lies, and any partitioning gives the same. It shows what was changed, moved or lost; it is no
signature against forgers.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd.argument import ONE_AT_A_TIME

_SEEDS = (0x9E3779B9, 0x7F4A7C15)  # Two independent sums: 64 bits.


def fingerprints(state: NestedMap, state_spec: NestedMap) -> dict[str, list[str]]:
    """A fingerprint of 16 hexadecimal digits for each expert of each array, by path.

    Args:
      state: JAX arrays; all processes must call it.
      state_spec: their TensorSpecs. An array without the dim E counts as one expert.
    """
    found = {}
    for (path, array), spec in zip(state.FlattenItems(), state_spec.Flatten(), strict=True):
        with ONE_AT_A_TIME:
            sums = np.asarray(_program(spec.dims, array.sharding.mesh)(array))
        found[path] = [f"{high:08x}{low:08x}" for high, low in sums.tolist()]
    return found


@functools.cache
def _program(dims: str, mesh: Mesh):
    """Compiled once for each shape and sharding: a model has many arrays of a few."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(_sums, dims=dims), out_shardings=everywhere)


def _sums(x: jax.Array, dims: str) -> jax.Array:
    """uint32 [E, 2]."""
    by_expert = jnp.moveaxis(x, dims.index("E"), 0) if "E" in dims else x[None]
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(by_expert, unsigned).astype(jnp.uint32)
    place = _place(by_expert.shape)
    hashes = [_mixed(bits ^ _mixed(place + jnp.uint32(seed))) for seed in _SEEDS]
    rest = tuple(range(1, by_expert.ndim))
    return jnp.stack([jnp.sum(h, rest, dtype=jnp.uint32) for h in hashes], axis=1)


def _place(shape: tuple[int, ...]) -> jax.Array:
    """Each element's place within its expert, row-major, modulo 2**32."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(1, len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return place


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit depends on all: MurmurHash3's last step."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
