"""The training loop: calls of K steps, hooks after each, and checkpoints in between."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import processes
from lingvo_gshard.train.checkpoints import Checkpoints
from lingvo_gshard.train.feed import Group
from lingvo_gshard.train.hooks import TrainCall, TrainHook


def group_sizes(step: int, max_steps: int | None, steps_per_call: int) -> Iterator[int]:
    """Yields the number of steps in each call after `step`; the last call may do fewer."""
    while max_steps is None or step < max_steps:
        size = steps_per_call if max_steps is None else min(steps_per_call, max_steps - step)
        yield size
        step += size


class TrainLoop:
    """Calls the train program until its input ends or a hook of any process asks it to stop.

    `train_params`, those of config.train_params, tell when to save.
    """

    def __init__(
        self, checkpoints: Checkpoints, hooks: Sequence[TrainHook], train_params: Params
    ) -> None:
        self._checkpoints, self._hooks, self._params = checkpoints, hooks, train_params
        self._last_save_secs = time.monotonic()

    def run(self, state: NestedMap, groups: Iterable[Group]) -> None:
        """Trains, and returns once the last checkpoint is complete on disk.

        Raises SaveError if a checkpoint could not be written.
        """
        step = int(state.step)
        with contextlib.ExitStack() as at_end:
            for hook in reversed(self._hooks):  # An ExitStack calls the last one pushed first.
                at_end.callback(hook.end)
            for hook in self._hooks:
                hook.begin(step)
            self._run(state, groups, step)

    def _run(self, state: NestedMap, groups: Iterable[Group], step: int) -> None:
        saved_step, call_ended, last = step, None, None
        stop, _ = self._requests()
        timed = _timed(groups)
        while not stop and (following := next(timed, None)):
            group, wait_secs = following
            if call_ended is None:
                call_ended, wait_secs = time.monotonic(), 0.0
            result = group.executable(state, group.batches)
            state, step, last = result.state, step + group.num_steps, group
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
                saved_step, call_ended = step, None
                stop, _ = self._requests()  # A hook may have taken long.
        if last is not None and saved_step != step:
            self._save(step, state, last, notify=not stop)
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


def _timed(groups: Iterable[Group]) -> Iterator[tuple[Group, float]]:
    """Yields each group and how many seconds it was waited for."""
    began = time.monotonic()
    for group in groups:
        yield group, time.monotonic() - began
        began = time.monotonic()
