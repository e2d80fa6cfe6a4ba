"""Turns batches by index into an iterator, which reads them in the background."""

import weakref
from typing import Any, Protocol, Self

from lingvo_gshard.core.late import grain
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.input.base_input import BaseInput

_PREFETCHED_BATCHES = 4  # Read while the device computes.


class Batches(Protocol):
    """Batches by index."""

    def __len__(self) -> int:
        """Returns an upper bound of the number of batches."""

    def __getitem__(self, index: int) -> NestedMap | None:
        """Returns batch `index`, always the same one; None after the last batch."""


class PrefetchedInput(BaseInput):
    """An iterator over batches that reads a few of them ahead, and can continue at any batch."""

    def __init__(self, batches: Batches) -> None:
        self._iterator = _prefetched(batches)
        # Grain's own clean-up at exit would run after modules that it needs were unloaded.
        self._close = weakref.finalize(self, self._iterator.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NestedMap:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch, JSON-able and the same in all processes."""
        return dict(self._iterator.get_state())

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues, bit for bit, where `get_state` returned `state`.

        Raises ValueError if `state` is not the state of an input.
        """
        # Grain would accept any other dict, and continue somewhere else.
        expected = sorted(self.get_state())
        if sorted(state) != expected:
            raise ValueError(f"input state has {sorted(state)}, expected {expected}")
        self._iterator.set_state({name: int(value) for name, value in state.items()})

    def close(self) -> None:
        """Stops the prefetch thread."""
        self._close()


def check_share(p: BaseInput.Params, num_processes: int) -> None:
    """Raises ValueError if n processes cannot share batches, or batch size or seed is too small.

    `p` has the settings of an input.
    """
    if p.batch_size < 1:
        raise ValueError(f"batch_size {p.batch_size}: expected at least 1")
    if p.seed < 0:
        raise ValueError(f"seed {p.seed}: expected at least 0")
    if p.batch_size % num_processes != 0:
        raise ValueError(
            f"num_processes {num_processes}: expected a divisor of batch_size {p.batch_size}"
        )


def _prefetched(batches: Batches) -> Any:
    """Returns Grain's iterator over batches, which reads a few of them ahead."""
    # The prefetch thread does the reading; Grain's own readers would add more threads.
    one_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.source(batches).to_iter_dataset(one_thread)
    prefetched = grain.experimental.ThreadPrefetchIterDataset(
        dataset, prefetch_buffer_size=_PREFETCHED_BATCHES
    )
    return iter(prefetched)
