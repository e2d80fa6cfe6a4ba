"""PaddedArray: an array on devices whose number does not divide one of its dims.

JAX gives each device an equal part of an array. So a program's arguments and results are padded at
the end of such a dim: of 13 rows on 8 devices, 6 devices hold two rows, one holds a row and a row
of padding, and the last one only padding. The program computes with the 13 rows (lowering.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from xla_spmd.mesh import names_of


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedArray:
    """An array of shape `shape`, which is padded on the devices; np.asarray removes the padding.

    Programs take it like a JAX array.
    """

    padded: jax.Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def delete(self) -> None:
        """Frees the memory on the devices, like jax.Array.delete."""
        self.padded.delete()

    def is_deleted(self) -> bool:
        """Returns whether its memory was freed, or given to a program's result."""
        return self.padded.is_deleted()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(without_padding(np.asarray(self.padded), self.shape), dtype, copy=copy)


def padded_shape(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns `shape` with each dim rounded up to a multiple of its number of parts."""
    # A sharding may omit trailing dims that are whole.
    axes = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    sizes = []
    for size, axis in zip(shape, axes, strict=True):
        num_parts = 1
        for name in names_of([axis]):
            num_parts *= sharding.mesh.shape[name]
        sizes.append(-(-size // num_parts) * num_parts)
    return tuple(sizes)


def without_padding(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns the elements of a padded JAX or numpy array that are within `shape`."""
    if array.shape == shape:
        return array
    return array[tuple(slice(size) for size in shape)]


def end_padding(shape: tuple[int, ...], padded: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the padding, for np.pad or jnp.pad, before and after each dim of `shape`."""
    return [(0, end - size) for size, end in zip(shape, padded, strict=True)]


def on_devices(array: jax.Array | PaddedArray) -> jax.Array:
    """Returns the JAX array on the devices, including any padding."""
    return array.padded if isinstance(array, PaddedArray) else array


def of_shape(array: jax.Array, shape: tuple[int, ...]) -> jax.Array | PaddedArray:
    """Returns an array on devices as one of `shape`: the array itself if it is not padded."""
    return array if array.shape == shape else PaddedArray(array, shape)
