"""The feed: a background thread that stacks the next K batches and puts them on the devices."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap


class Input(Protocol):
    """What an input_fn returns.

    Iterating yields NestedMap(features, labels) of numpy arrays; `specs` are their TensorSpecs,
    of the rows of all processes.
    `get_state` is a JSON-able dict from which `set_state` continues with the batch after the
    last one yielded.
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
      batches: arrays [K, B, ...] on their devices.
      num_steps: K.
      input_state: the input's state after these batches; a checkpoint holds it.
    """

    batches: NestedMap
    num_steps: int
    input_state: dict[str, Any]


class Feed:
    """Yields Groups, one ahead of the caller. Use as a context manager: leaving ends its thread."""

    def __init__(
        self,
        source: Input,
        group_sizes: Iterator[int],
        place: Callable[[NestedMap, int], NestedMap],
    ) -> None:
        """Starts the thread.

        Args:
          source: where batches come from.
          group_sizes: how many batches each call takes.
          place: puts stacked batches, and their number, on the devices.
        """
        self._source, self._group_sizes, self._place = source, group_sizes, place
        self._queue: queue.Queue[Group | BaseException | None] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Group]:
        """Yields until the sizes or the batches end; raises what the thread raised."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _run(self) -> None:
        try:
            batches = iter(self._source)
            for size in self._group_sizes:
                if self._stopped.is_set():
                    return
                group = self._next_group(batches, size)
                if group is not None:
                    self._put(group)
                if group is None or group.num_steps < size:
                    break
            self._put(None)
        except BaseException as error:  # Whatever it is, the caller's thread shall raise it.
            self._put(error)

    def _next_group(self, batches: Iterator[NestedMap], size: int) -> Group | None:
        """The next `size` batches; fewer where the input ends, None if there are none."""
        taken = list(itertools.islice(batches, size))
        if not taken:
            return None
        leaves = zip(*(batch.Flatten() for batch in taken), strict=True)
        stacked = taken[0].Pack(np.stack(leaf) for leaf in leaves)
        return Group(self._place(stacked, len(taken)), len(taken), self._source.get_state())

    def _put(self, item: Group | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
