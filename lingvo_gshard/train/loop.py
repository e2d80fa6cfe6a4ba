"""The training loop: calls of K steps, hooks after each, checkpoints in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.train.checkpoints import Checkpoints
from lingvo_gshard.train.feed import Feed, Group
from lingvo_gshard.train.hooks import TrainCall, TrainHook


class NonFiniteLossError(FloatingPointError):
    """The loss became infinite or no number; the last checkpoint is from before."""


def group_sizes(step: int, max_steps: int | None, steps_per_call: int) -> Iterator[int]:
    """How many steps each call does, from `step` on; the last may do fewer."""
    while max_steps is None or step < max_steps:
        size = steps_per_call if max_steps is None else min(steps_per_call, max_steps - step)
        yield size
        step += size


class TrainLoop:
    """Runs calls until the feed ends."""

    def __init__(
        self,
        executable_of: Callable[[int], Executable],
        checkpoints: Checkpoints,
        save_every_steps: int,
        hooks: Sequence[TrainHook],
    ) -> None:
        """Args:
        executable_of: the train program of K steps, by K.
        checkpoints: where to save.
        save_every_steps: save after a call that reaches a multiple of it.
        hooks: in the order in which they are called.
        """
        self._executable_of = executable_of
        self._checkpoints, self._save_every_steps = checkpoints, save_every_steps
        self._hooks = hooks

    def run(self, state: NestedMap, feed: Feed) -> NestedMap:
        """Trains; returns the last state, of which a checkpoint was written.

        Raises:
          NonFiniteLossError: names the step.
        """
        step = int(state.step)
        try:
            for hook in self._hooks:
                hook.begin(step)
            return self._run(state, feed, step)
        finally:
            for hook in self._hooks:
                hook.end()

    def _run(self, state: NestedMap, feed: Feed, step: int) -> NestedMap:
        last: Group | None = None
        saved, before = step, None
        for last in feed:
            executable = self._executable_of(last.num_steps)
            before = time.monotonic() if before is None else before
            result = executable(state, last.batches)
            state, step = result.state, step + last.num_steps
            metrics = result.metrics.Transform(np.asarray)  # Waits for the devices.
            now = time.monotonic()
            call = TrainCall(step, last.num_steps, metrics, now - before)
            before = now
            self._check_finite(call)
            for hook in self._hooks:
                hook.after_call(call)
            if call.reaches_multiple_of(self._save_every_steps):
                saved, before = self._save(state, last, step), None
        if last is not None and saved != step:
            self._save(state, last, step)
        return state

    def _save(self, state: NestedMap, group: Group, step: int) -> int:
        self._checkpoints.save(step, state, group.input_state)
        for hook in self._hooks:
            hook.after_save(step, state)
        return step

    def _check_finite(self, call: TrainCall) -> None:
        finite = np.isfinite(call.metrics.loss)
        if not finite.all():
            first = int(np.argmin(finite))
            raise NonFiniteLossError(
                f"The loss of step {call.step - call.num_steps + first + 1} is "
                f"{call.metrics.loss[first]}; the last checkpoint is of step "
                f"{self._checkpoints.latest()}."
            )
