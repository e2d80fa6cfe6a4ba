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
from lingvo_gshard.spmd import processes, traces
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.spmd.specs import ROWS, Share
from lingvo_gshard.train.hooks import TrainCall, TrainHook
from lingvo_gshard.train.run_times import Category, Laps

_GROUPS_AHEAD = 2  # One on the devices, and one that is being read.


class Input(Protocol):
    """The result of an input_fn.

    It may also have the methods `close`, and count_batches(limit) for the time that is left.
    """

    @property
    def specs(self) -> NestedMap:
        """The TensorSpecs of a batch, with the rows of all processes."""

    def __iter__(self) -> Iterator[NestedMap]:
        """Yields batches NestedMap(features, labels) of numpy arrays, with this process's rows."""

    def get_state(self) -> dict[str, Any]:
        """Returns a JSON-able dict that represents the batches yielded so far."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the last batch that had been yielded when `get_state` was called."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The batches of one call, and everything needed to run and save it."""

    executable: Executable  # The program of K steps.
    batches: NestedMap  # Arrays [K, B, ...] on their devices.
    num_steps: int  # K.
    input_state: dict[str, Any]  # The input's state after these batches.


def groups(
    source: Input, sizes: Iterator[int], program: Callable[[int], Executable]
) -> Generator[Group]:
    """Yields Groups of `sizes` batches, which a thread prepares ahead; close it to end the thread.

    If the source ends, the last group may be smaller. program(K) is the executable of K steps.
    """
    batches = iter(source)

    def next_group() -> Group | None:
        size = next(sizes, 0)
        group = list(itertools.islice(batches, size))
        if not group:
            return None

        # Stack the batches' [B, ...] to [K, B, ...].
        stacked = group[0].Transform(lambda *leaves: np.stack(leaves), *group[1:])
        input_state = source.get_state()  # Before the next group is read.
        num_steps = len(group)
        executable = program(num_steps)
        placed = executable.place("batches", stacked)
        return Group(executable, placed, num_steps, input_state)

    # Only one thread, since the source must be read in order.
    thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
    try:
        # The next group is read when one is taken, so at most _GROUPS_AHEAD wait in memory.
        ahead = collections.deque(thread.submit(next_group) for _ in range(_GROUPS_AHEAD))
        while (group := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next_group))
            yield group
    finally:
        thread.shutdown(cancel_futures=True)


def batch_spec_of(batch: NestedMap, specs: NestedMap, share: Share) -> NestedMap:
    """Returns the specs of a whole batch, given this process's share of its rows.

    The sizes come from `batch`, and may differ from the sizes in `specs`.
    """

    def whole(array: np.ndarray, spec: TensorSpec) -> TensorSpec:
        shape = tuple(
            size * share.count if dim == ROWS else size
            for size, dim in zip(array.shape, spec.dims, strict=True)
        )
        return dataclasses.replace(spec, shape=shape)

    return batch.Transform(whole, specs)


def group_sizes(step: int, max_steps: int | None, steps_per_call: int) -> Iterator[int]:
    """Yields the number of steps in each call after `step`; the last call may do fewer."""
    while max_steps is None or step < max_steps:
        size = steps_per_call
        if max_steps is not None:
            size = min(size, max_steps - step)
        yield size
        step += size


@dataclasses.dataclass(frozen=True)
class _Requests:
    """The requests of all processes together: each is true if any process makes it."""

    stop: bool  # End now; another start will continue.
    complete: bool  # End as if max_steps were reached.
    save: bool

    @property
    def ends(self) -> bool:
        return self.stop or self.complete

    @property
    def interrupts(self) -> bool:
        return self.stop and not self.complete


class TrainLoop:
    """Calls the train program until its input ends or a hook of any process requests a stop."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        hooks: Sequence[TrainHook],
        train_params: Params,
        laps: Laps,
    ) -> None:
        """`laps` records how the time is spent."""
        self._checkpoints = checkpoints
        self._hooks = hooks
        self._params = train_params
        self._laps = laps
        self._last_save_secs = time.monotonic()

    def run(self, state: NestedMap, groups: Iterable[Group]) -> None:
        """Trains, and returns once the last checkpoint is complete.

        Raises SaveError if a checkpoint could not be written.
        """
        step = int(state.step)
        # Hooks are ended even if their `begin` was not reached.
        with contextlib.ExitStack() as at_end:
            for hook in reversed(self._hooks):  # An ExitStack calls the last pushed one first.
                at_end.callback(hook.end)
            for hook in self._hooks:
                hook.begin(step)
            self._run(state, groups, step)

    def _run(self, state: NestedMap, groups: Iterable[Group], step: int) -> None:
        """Trains from `state`, after `step` steps; `run` adds the hooks' begin and end."""
        previous_end: float | None = None  # When the previous call ended; None after a save.
        unsaved: Group | None = None  # The last group, if its state is not saved yet.
        requests = self._requests()
        upcoming = iter(groups)
        self._laps.lap(Category.START)
        waits_for = Category.START

        while not requests.ends:
            wait_start = time.monotonic()
            group = next(upcoming, None)
            if group is None:
                break
            wait_end = time.monotonic()
            self._laps.lap(waits_for)
            waits_for = Category.INPUT

            first_step = step + 1
            step += group.num_steps
            for hook in self._hooks:
                hook.before_call(range(first_step, step + 1), group.executable)

            state, metrics, host_call = self._call(state, group, step)
            unsaved = group
            call_end = time.monotonic()
            self._laps.lap(Category.STEPS)
            if previous_end is None:
                secs = call_end - wait_end
                wait_secs = 0.0
            else:
                secs = call_end - previous_end
                wait_secs = wait_end - wait_start
            call = TrainCall(step, group.num_steps, metrics, secs, wait_secs, host_call)
            previous_end = call_end
            for hook in self._hooks:
                hook.after_call(call)
            self._laps.lap(Category.OTHER)

            requests = self._requests()
            is_due = requests.save or call.reaches_multiple_of(self._params.save_checkpoints_steps)
            if is_due and not requests.ends:
                self._save(step, state, group, notify=True)
                unsaved = None
                previous_end = None  # The save does not count in the next call's time.
                requests = self._requests()  # A hook may have taken long.

        # A stop must be quick, so its save is not passed to the hooks: one of them would evaluate.
        if unsaved is not None:
            self._save(step, state, unsaved, notify=not requests.interrupts)
        self._checkpoints.wait()
        self._laps.lap(Category.CHECKPOINTS)
        if requests.interrupts:
            for hook in self._hooks:
                hook.on_stop(step)

    def _call(
        self, state: NestedMap, group: Group, step: int
    ) -> tuple[NestedMap, NestedMap, NestedMap]:
        """Runs a group's steps, of which `step` is the last.

        Returns the new state, and the metrics and the tensors of the host_call, both on the host.
        """
        # The call reuses the memory of the state's arrays: from here on, only its result exists.
        with traces.mark(step):
            result = group.executable(state, group.batches)

            # Copying the metrics to the host waits for the devices, which ends the call.
            metrics = result.metrics.Transform(np.asarray)
            host_call = result.get("host_call", NestedMap()).Transform(np.asarray)
        return result.state, metrics, host_call

    def _requests(self) -> _Requests:
        """Returns the requests of all processes; all processes must call it."""
        # Signals and clocks differ between processes, but programs must not: the maximum decides.
        wants_to_stop = any(hook.wants_to_stop() for hook in self._hooks)
        is_complete = any(hook.is_complete() for hook in self._hooks)
        limit_secs = self._params.save_checkpoints_secs
        elapsed_secs = time.monotonic() - self._last_save_secs
        save_now = limit_secs is not None and elapsed_secs >= limit_secs

        anywhere = processes.largest([wants_to_stop, is_complete, save_now])
        return _Requests(*map(bool, anywhere))

    def _save(self, step: int, state: NestedMap, group: Group, *, notify: bool) -> None:
        """Begins to save the state after `group`, and then runs the hooks if `notify`."""
        self._checkpoints.save(step, state, group.input_state)
        self._last_save_secs = time.monotonic()
        self._laps.lap(Category.CHECKPOINTS)
        if notify:
            for hook in self._hooks:
                hook.after_save(step, state)
            self._laps.lap(Category.EVALUATION)
