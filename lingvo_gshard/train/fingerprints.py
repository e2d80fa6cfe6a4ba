"""Fingerprints of a state's arrays, one for each expert, computed by the devices that hold it.

A fingerprint is the sum, modulo 2**32, of a hash of each element's bits and position in an expert.
Sums of parts add up to the sum of the whole, so every partitioning gives the same one. It detects
elements that were changed, moved or lost; it does not detect forgery.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd.argument import ONE_AT_A_TIME

_SEEDS = (0x9E3779B9, 0x7F4A7C15)  # Two independent sums make 64 bits.


def fingerprints(state: NestedMap, state_spec: NestedMap) -> dict[str, list[str]]:
    """Returns 16 hexadecimal digits for each expert of each JAX array, by dotted path.

    `state_spec` holds their TensorSpecs; an array without the dim E counts as one expert. All
    processes must call it.
    """
    found = {}
    for (path, array), spec in zip(state.FlattenItems(), state_spec.Flatten(), strict=True):
        with ONE_AT_A_TIME:
            sums = np.asarray(_program(spec.dims, array.sharding.mesh)(array))
        found[path] = [f"{high:08x}{low:08x}" for high, low in sums.tolist()]
    return found


@functools.cache
def _program(dims: str, mesh: Mesh):
    """Compiled once for each shape and sharding, which many arrays of a model share."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(_sums, dims=dims), out_shardings=everywhere)


def _sums(x: jax.Array, dims: str) -> jax.Array:
    """Returns uint32 [E, 2]."""
    by_expert = jnp.moveaxis(x, dims.index("E"), 0) if "E" in dims else x[None]
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(by_expert, unsigned).astype(jnp.uint32)
    position = _position(by_expert.shape)
    hashes = [_mixed(bits ^ _mixed(position + jnp.uint32(seed))) for seed in _SEEDS]
    rest = tuple(range(1, by_expert.ndim))
    return jnp.stack([jnp.sum(h, rest, dtype=jnp.uint32) for h in hashes], axis=1)


def _position(shape: tuple[int, ...]) -> jax.Array:
    """Returns each element's row-major position within its expert, modulo 2**32."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis in range(1, len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return position


def _mixed(x: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer: a bijection of 32 bits in which every bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
