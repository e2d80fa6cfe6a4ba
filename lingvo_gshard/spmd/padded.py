"""PaddedArray: an array on devices with a dim that their number does not divide.

JAX gives each device an equal part of an array. So a program's arguments and results are padded at
the end of such a dim: of 13 rows on 8 devices, 6 devices hold two, one holds a row and a row of
padding, and the last one padding alone. The program computes with the 13 rows (lowering.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lingvo_gshard.sharding.mesh import names_of


@dataclasses.dataclass(frozen=True, eq=False)
class PaddedArray:
    """An array of shape `shape`, which np.asarray returns, padded where it lies.

    Other programs take it as they take a JAX array.
    """

    padded: jax.Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its elements."""
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return len(self.shape)

    def delete(self) -> None:
        """Frees the memory on the devices, as jax.Array.delete."""
        self.padded.delete()

    def is_deleted(self) -> bool:
        """Returns whether its memory was freed, or given to a program's result."""
        return self.padded.is_deleted()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(without_padding(np.asarray(self.padded), self.shape), dtype, copy=copy)


def padded_shape(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns `shape` with each dim rounded up to a multiple of the parts it is split into."""
    # A sharding may leave out the last dims if they are whole.
    axes = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    sizes = []
    for size, axis in zip(shape, axes, strict=True):
        num_parts = 1
        for name in names_of([axis]):
            num_parts *= sharding.mesh.shape[name]
        sizes.append(-(-size // num_parts) * num_parts)
    return tuple(sizes)


def without_padding(array: Any, shape: tuple[int, ...]) -> Any:
    """Returns the elements of a padded JAX or numpy array that belong to `shape`."""
    if array.shape == shape:
        return array
    return array[tuple(slice(size) for size in shape)]


def end_padding(shape: tuple[int, ...], padded: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns how much np.pad or jnp.pad has to add before and after each dim of `shape`."""
    return [(0, end - size) for size, end in zip(shape, padded, strict=True)]


def on_devices(array: jax.Array | PaddedArray) -> jax.Array:
    """Returns the JAX array that lies on the devices, with its padding if it has any."""
    return array.padded if isinstance(array, PaddedArray) else array


def of_shape(array: jax.Array, shape: tuple[int, ...]) -> jax.Array | PaddedArray:
    """Returns an array that lies on devices as one of `shape`: itself, if it has no padding."""
    return array if array.shape == shape else PaddedArray(array, shape)
