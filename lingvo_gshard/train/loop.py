"""The training loop: calls of K steps, hooks after each, and checkpoints in between.

A thread places groups of K batches on the devices; each process reads its share of their rows.
"""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.checkpoints.checkpoints import Checkpoints
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.layout import TensorSpec
from lingvo_gshard.spmd import processes
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.spmd.specs import ROWS, Share
from lingvo_gshard.train.hooks import TrainCall, TrainHook

_GROUPS_AHEAD = 2


class Input(Protocol):
    """What an input_fn returns; it may also have a method `close`.

    Iterating yields NestedMap(features, labels) of numpy arrays, which hold this process's rows;
    `specs` are the TensorSpecs of the rows of all processes. `get_state` returns a JSON-able dict
    from which `set_state` continues with the batch after the last one yielded.
    """

    @property
    def specs(self) -> NestedMap: ...

    def __iter__(self) -> Iterator[NestedMap]: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True)
class Group:
    """The batches of one call, arrays [K, B, ...] on their devices; their program and end state."""

    executable: Executable
    batches: NestedMap
    num_steps: int
    input_state: dict[str, Any]


def groups(
    source: Input, sizes: Iterator[int], program: Callable[[int], Executable]
) -> Generator[Group]:
    """Yields Groups of `sizes` batches, which a thread prepares ahead; close it to end the thread.

    If the source ends, the last one may be smaller. program(K) is the executable of K steps.
    """
    batches = iter(source)

    def next_group() -> Group | None:
        taken = list(itertools.islice(batches, next(sizes, 0)))
        if not taken:
            return None
        stacked = taken[0].Transform(lambda *leaf: np.stack(leaf), *taken[1:])
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


def batch_spec_of(batch: NestedMap, specs: NestedMap, share: Share) -> NestedMap:
    """Returns the specs of a whole batch, given a share of rows; sizes may differ from `specs`."""

    def whole(array: np.ndarray, spec: TensorSpec) -> TensorSpec:
        sizes = zip(array.shape, spec.dims, strict=True)
        shape = tuple(size * (share.count if dim == ROWS else 1) for size, dim in sizes)
        return dataclasses.replace(spec, shape=shape)

    return batch.Transform(whole, specs)


def group_sizes(step: int, max_steps: int | None, steps_per_call: int) -> Iterator[int]:
    """Yields the number of steps in each call after `step`; the last call may do fewer."""
    while max_steps is None or step < max_steps:
        size = steps_per_call if max_steps is None else min(steps_per_call, max_steps - step)
        yield size
        step += size


class TrainLoop:
    """Calls the train program until its input ends or a hook of any process asks it to stop."""

    def __init__(
        self, checkpoints: Checkpoints, hooks: Sequence[TrainHook], train_params: Params
    ) -> None:
        self._checkpoints, self._hooks, self._params = checkpoints, hooks, train_params
        self._last_save_secs = time.monotonic()

    def run(self, state: NestedMap, groups: Iterable[Group]) -> None:
        """Trains, and returns once the last checkpoint is complete; raises as Checkpoints.save."""
        step = int(state.step)
        with contextlib.ExitStack() as at_end:
            for hook in reversed(self._hooks):  # An ExitStack calls the last one pushed first.
                at_end.callback(hook.end)
            for hook in self._hooks:
                hook.begin(step)
            self._run(state, groups, step)

    def _run(self, state: NestedMap, groups: Iterable[Group], step: int) -> None:
        call_ended = unsaved = None
        stop, _ = self._requests()
        ahead = iter(groups)
        while not stop:
            wait_began = time.monotonic()
            if (group := next(ahead, None)) is None:
                break
            wait_secs = time.monotonic() - wait_began
            if call_ended is None:
                call_ended, wait_secs = time.monotonic(), 0.0
            result = group.executable(state, group.batches)
            state, step, unsaved = result.state, step + group.num_steps, group
            metrics = result.metrics.Transform(np.asarray)  # Waits for the devices.
            now = time.monotonic()
            call = TrainCall(step, group.num_steps, metrics, now - call_ended, wait_secs)
            call_ended = now
            for hook in self._hooks:
                hook.after_call(call)
            stop, save_now = self._requests()
            due = save_now or call.reaches_multiple_of(self._params.save_checkpoints_steps)
            if due and not stop:
                self._save(step, state, group, notify=True)
                call_ended = unsaved = None
                stop, _ = self._requests()  # A hook may have taken long.
        if unsaved is not None:
            self._save(step, state, unsaved, notify=not stop)
        self._checkpoints.wait()
        if stop:
            for hook in self._hooks:
                hook.on_stop(step)

    def _requests(self) -> tuple[bool, bool]:
        """Returns whether any process wants to stop, and whether any wants to save by time."""
        limit_secs = self._params.save_checkpoints_secs
        elapsed_secs = time.monotonic() - self._last_save_secs
        wants_to_stop = any(hook.wants_to_stop() for hook in self._hooks)
        save_now = limit_secs is not None and elapsed_secs >= limit_secs
        stop, save_now = processes.largest([wants_to_stop, save_now])
        return bool(stop), bool(save_now)

    def _save(self, step: int, state: NestedMap, group: Group, *, notify: bool) -> None:
        self._checkpoints.save(step, state, group.input_state)
        self._last_save_secs = time.monotonic()
        for hook in self._hooks if notify else ():
            hook.after_save(step, state)
