"""The training loop: calls of K steps, hooks after each, checkpoints in between."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.train.checkpoints import Checkpoints
from lingvo_gshard.train.feed import Feed, Group
from lingvo_gshard.train.hooks import TrainCall, TrainHook


def group_sizes(step: int, max_steps: int | None, steps_per_call: int) -> Iterator[int]:
    """How many steps each call does, from `step` on; the last may do fewer."""
    while max_steps is None or step < max_steps:
        size = steps_per_call if max_steps is None else min(steps_per_call, max_steps - step)
        yield size
        step += size


@dataclasses.dataclass(frozen=True)
class SaveEvery:
    """When to save: after a call that reaches a multiple of `steps`, or `secs` after the last."""

    steps: int
    secs: float | None = None


class TrainLoop:
    """Runs calls until the feed ends, or a hook of any process wants to stop."""

    def __init__(
        self,
        executable_of: Callable[[int], Executable],
        checkpoints: Checkpoints,
        save_every: SaveEvery,
        hooks: Sequence[TrainHook],
    ) -> None:
        """Keeps what it is given.

        Args:
          executable_of: the train program of K steps, by K.
          checkpoints: where to save.
          save_every: how often.
          hooks: in the order in which they are called.
        """
        self._executable_of = executable_of
        self._checkpoints, self._save_every = checkpoints, save_every
        self._hooks = hooks
        self._last_save_secs = time.monotonic()

    def run(self, state: NestedMap, feed: Feed) -> NestedMap:
        """Trains; returns the last state, of which a checkpoint is whole on disk.

        Raises:
          SaveError: a checkpoint could not be written.
        """
        step = int(state.step)
        with contextlib.ExitStack() as at_end:
            for hook in reversed(self._hooks):  # What is pushed last is called first.
                at_end.callback(hook.end)
            for hook in self._hooks:
                hook.begin(step)
            return self._run(state, feed, step)

    def _run(self, state: NestedMap, feed: Feed, step: int) -> NestedMap:
        saved, before, last = step, None, None
        stop, _ = self._wishes()
        for group, wait_secs in _timed(feed) if not stop else ():
            executable = self._executable_of(group.num_steps)
            if before is None:
                before, wait_secs = time.monotonic(), 0.0
            result = executable(state, group.batches)
            state, step, last = result.state, step + group.num_steps, group
            metrics = result.metrics.Transform(np.asarray)  # Waits for the devices.
            now = time.monotonic()
            call = TrainCall(step, group.num_steps, metrics, now - before, wait_secs)
            before = now
            for hook in self._hooks:
                hook.after_call(call)
            stop, time_to_save = self._wishes()
            if stop:
                break
            if time_to_save or call.reaches_multiple_of(self._save_every.steps):
                self._save(step, state, group)
                self._tell_saved(step, state)
                saved, before = step, None
                stop, _ = self._wishes()  # A hook may have taken long.
                if stop:
                    break
        if last is not None and saved != step:
            self._save(step, state, last)
            if not stop:
                self._tell_saved(step, state)
        self._checkpoints.wait()
        if stop:
            for hook in self._hooks:
                hook.on_stop(step)
        return state

    def _wishes(self) -> tuple[bool, bool]:
        """Whether any process wants to stop, and whether it is time to save."""
        late = time.monotonic() - self._last_save_secs
        here = (
            any(hook.wants_to_stop() for hook in self._hooks),
            self._save_every.secs is not None and late >= self._save_every.secs,
        )
        stop, time_to_save = processes.largest(here)
        return bool(stop), bool(time_to_save)

    def _save(self, step: int, state: NestedMap, group: Group) -> None:
        self._checkpoints.save(step, state, group.input_state)
        self._last_save_secs = time.monotonic()

    def _tell_saved(self, step: int, state: NestedMap) -> None:
        for hook in self._hooks:
            hook.after_save(step, state)


def _timed(feed: Feed) -> Iterator[tuple[Group, float]]:
    """Each group, and the seconds it was waited for."""
    began = time.monotonic()
    for group in feed:
        yield group, time.monotonic() - began
        began = time.monotonic()
