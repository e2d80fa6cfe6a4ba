"""The feed: groups of K batches, stacked and placed on the devices by a background thread.

With several processes, each one reads its own share of a batch's rows.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import Partitioning, TensorSpec
from lingvo_gshard.spmd import specs
from lingvo_gshard.spmd.executable import Executable

_ROWS = "B"  # The letter of the dim whose parts the processes read.
_GROUPS_AHEAD = 2


class Input(Protocol):
    """What an input_fn returns.

    Iterating yields NestedMap(features, labels) of numpy arrays, which hold this process's rows;
    `specs` are the TensorSpecs of the rows of all processes. `get_state` returns a JSON-able dict
    from which `set_state` continues with the batch after the last one yielded. An input may also
    have a method `close`.
    """

    @property
    def specs(self) -> NestedMap: ...

    def __iter__(self) -> Iterator[NestedMap]: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Group:
    """The batches of one call.

    Attributes:
      executable: the train program of K steps.
      batches: arrays [K, B, ...] on their devices.
      num_steps: K.
      input_state: the input's state after these batches, for the checkpoint.
    """

    executable: Executable
    batches: NestedMap
    num_steps: int
    input_state: dict[str, Any]


def groups(
    source: Input, sizes: Iterator[int], program: Callable[[int], Executable]
) -> Generator[Group]:
    """Yields Groups, which a thread prepares ahead; close the iterator to end the thread.

    Args:
      source: the input. If it ends, the last group may be smaller than its size.
      sizes: the number of batches in each group.
      program: returns the train program of a number of steps.
    """
    batches = iter(source)

    def next_group() -> Group | None:
        taken = list(itertools.islice(batches, next(sizes, 0)))
        if not taken:
            return None
        leaves = zip(*(batch.Flatten() for batch in taken), strict=True)
        stacked = taken[0].Pack(np.stack(leaf) for leaf in leaves)
        state, executable = source.get_state(), program(len(taken))
        return Group(executable, executable.place("batches", stacked), len(taken), state)

    thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
    try:
        ahead = collections.deque(thread.submit(next_group) for _ in range(_GROUPS_AHEAD))
        while (group := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next_group))
            yield group
    finally:
        thread.shutdown(cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Share:
    """Part `index` of the `count` equal parts of a batch's rows."""

    index: int
    count: int


WHOLE = Share(0, 1)


def own_share(partitioning: Partitioning) -> Share:
    """Returns the share of a batch's rows that this process reads.

    It is WHOLE if the processes' devices do not hold equal parts of adjacent rows.
    """
    size = partitioning.num_partitions
    mesh = specs.device_mesh(partitioning)
    split = specs.sharding(partitioning, TensorSpec((size,), "int32", _ROWS), mesh)
    held: dict[int, set[int]] = {}
    device: Any
    for device, (rows,) in split.devices_indices_map((size,)).items():
        held.setdefault(device.process_index, set()).update(range(*rows.indices(size)))
    return share_of(held, jax.process_index(), size)


def share_of(held: Mapping[int, set[int]], process: int, size: int) -> Share:
    """Returns the share of one process.

    Args:
      held: the row numbers that each process's devices hold, of `size` rows.
      process: one of the keys of `held`.
      size: the number of rows.

    Returns:
      WHOLE if the rows of some process are not adjacent, or the parts are not equal.
    """
    part = len(held[process])
    adjacent = {frozenset(range(start, start + part)) for start in range(0, size, part)}
    if size % part or adjacent != {frozenset(rows) for rows in held.values()}:
        return WHOLE
    return Share(min(held[process]) // part, size // part)


def batch_spec_of(batch: NestedMap, specs: NestedMap, share: Share) -> NestedMap:
    """Returns the TensorSpecs of all processes' rows of a batch.

    Args:
      batch: numpy arrays, this process's rows. Their sizes may differ from those in `specs`.
      specs: the TensorSpecs of the input, for their dtypes and dims.
      share: the part of the rows that the batch holds.
    """

    def whole(array: np.ndarray, spec: TensorSpec) -> TensorSpec:
        sizes = zip(array.shape, spec.dims, strict=True)
        shape = tuple(size * share.count if dim == _ROWS else size for size, dim in sizes)
        return TensorSpec(shape, spec.dtype, spec.dims)

    return specs.Pack(map(whole, batch.Flatten(), specs.Flatten()))
