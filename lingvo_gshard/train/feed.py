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
    """The batches of one call, arrays [K, B, ...] on their devices, and the program for them.

    `input_state` is the input's state after these batches, for the checkpoint.
    """

    executable: Executable
    batches: NestedMap
    num_steps: int
    input_state: dict[str, Any]


def groups(
    source: Input, sizes: Iterator[int], program: Callable[[int], Executable]
) -> Generator[Group]:
    """Yields Groups, which a thread prepares ahead; close the iterator to end the thread.

    `sizes` are the numbers of batches; if the source ends, the last group may be smaller.
    `program` returns the train program of a number of steps.
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
    """Returns the share of a batch's rows that this process reads; see `share_of`."""
    size = partitioning.num_partitions
    mesh = specs.device_mesh(partitioning)
    split = specs.sharding(partitioning, TensorSpec((size,), "int32", _ROWS), mesh)
    held: dict[int, set[int]] = collections.defaultdict(set)
    device: Any
    for device, (rows,) in split.devices_indices_map((size,)).items():
        held[device.process_index].update(range(*rows.indices(size)))
    return share_of(held, jax.process_index())


def share_of(held: Mapping[int, set[int]], process: int) -> Share:
    """Returns the share of `process`, given the row numbers that each process's devices hold.

    It is WHOLE if the rows of some process are not adjacent, or the parts are not equal.
    """
    size, part = len(set().union(*held.values())), len(held[process])
    parts = {frozenset(range(start, start + part)) for start in range(0, size, part)}
    if size % part or parts != {frozenset(rows) for rows in held.values()}:
        return WHOLE
    return Share(min(held[process]) // part, size // part)


def batch_spec_of(batch: NestedMap, specs: NestedMap, share: Share) -> NestedMap:
    """Returns the TensorSpecs of all processes' rows of a batch of numpy arrays.

    The batch holds the rows of `share`. It may be of other sizes than `specs`, the input's
    TensorSpecs, from which dtypes and dims are taken.
    """

    def whole(array: np.ndarray, spec: TensorSpec) -> TensorSpec:
        sizes = zip(array.shape, spec.dims, strict=True)
        shape = tuple(size * share.count if dim == _ROWS else size for size, dim in sizes)
        return TensorSpec(shape, spec.dtype, spec.dims)

    return specs.Pack(map(whole, batch.Flatten(), specs.Flatten()))
