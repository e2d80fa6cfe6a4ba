"""Which of a batch's rows are this process's, and batches of all processes from each one's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import specs

ROWS = "B"  # The letter of the dim that processes share.


@dataclasses.dataclass(frozen=True)
class Share:
    """Part `index` of the `count` equal parts of a batch's rows."""

    index: int
    count: int


WHOLE = Share(0, 1)


def own_share(partitioning: Partitioning) -> Share:
    """What the devices of this process hold of a batch; WHOLE if they hold no such part."""
    size = partitioning.num_partitions
    mesh = specs.device_mesh(partitioning)
    split = specs.sharding(partitioning, TensorSpec((size,), "int32", ROWS), mesh)
    held: dict[int, set[int]] = {}
    device: Any
    for device, (rows,) in split.devices_indices_map((size,)).items():
        held.setdefault(device.process_index, set()).update(range(*rows.indices(size)))
    return share_of(held, jax.process_index(), size)


def share_of(held: Mapping[int, set[int]], process: int, size: int) -> Share:
    """The share of one process, if each of all holds one of equally many adjacent rows.

    Args:
      held: which of `size` rows each process holds.
      process: one of them.
      size: rows in all.

    Returns:
      WHOLE if the rows of some process are not adjacent, or the parts are not equal.
    """
    part = len(held[process])
    adjacent = {frozenset(range(start, start + part)) for start in range(0, size, part)}
    if size % part or adjacent != {frozenset(rows) for rows in held.values()}:
        return WHOLE
    return Share(min(held[process]) // part, size // part)


def of_all(shape: tuple[int, ...], dims: str, share: Share) -> tuple[int, ...]:
    """The shape of all processes' rows, of that of one's."""
    return tuple(
        size * share.count if letter == ROWS else size
        for size, letter in zip(shape, dims, strict=True)
    )


def assembled(batch: NestedMap, spec: NestedMap, shardings: NestedMap, share: Share) -> NestedMap:
    """The batch of all processes, of this one's rows of it.

    Args:
      batch: numpy arrays; all processes must call it.
      spec: TensorSpecs of the whole batch.
      shardings: of the whole batch.
      share: this process's.

    Returns:
      JAX arrays.

    Raises:
      ValueError: an array has other than its share of the rows; names it.
    """
    if share == WHOLE:
        return batch
    leaves = zip(batch.FlattenItems(), spec.Flatten(), shardings.Flatten(), strict=True)
    return batch.Pack(_assembled(path, x, of, to, share) for (path, x), of, to in leaves)


def _assembled(
    path: str, array: np.ndarray, spec: TensorSpec, sharding: jax.sharding.Sharding, share: Share
) -> jax.Array:
    if of_all(array.shape, spec.dims, share) != tuple(spec.shape):
        raise ValueError(
            f"batch.{path}: {list(array.shape)} given, {list(spec.shape)} with one of "
            f"{share.count} equal parts of its rows expected: each process yields its own."
        )
    return jax.make_array_from_process_local_data(sharding, array, spec.shape)
