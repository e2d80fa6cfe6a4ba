"""Hooks of the training loop: the interface, and the progress bar."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tqdm

from lingvo_gshard.core.nested_map import NestedMap


@dataclasses.dataclass(frozen=True)
class TrainCall:
    """One call of the train program.

    Attributes:
      step: the number of steps done after the call.
      num_steps: K, the number of steps in the call.
      metrics: numpy arrays [K, ...], `loss` among them.
      secs: seconds since the previous call ended, including the wait for input. The first call,
        and the first one after a checkpoint, count from their own start.
      input_wait_secs: the part of `secs` in which the devices waited for input.
    """

    step: int
    num_steps: int
    metrics: NestedMap
    secs: float
    input_wait_secs: float = 0.0

    @property
    def steps_per_sec(self) -> float:
        """Training steps per second."""
        return self.num_steps / self.secs

    @property
    def tokens_per_sec(self) -> float | None:
        """Target tokens per second; None if the model has no metric `num_tokens`."""
        if "num_tokens" not in self.metrics:
            return None
        return float(np.sum(self.metrics.num_tokens)) / self.secs

    def mean(self) -> NestedMap:
        """Returns each metric's mean over the steps, in float64."""
        return self.metrics.Transform(lambda value: np.mean(value, axis=0, dtype=np.float64))

    def reaches_multiple_of(self, steps: int) -> bool:
        """Returns whether one of this call's steps is a multiple of `steps`."""
        return self.step // steps > (self.step - self.num_steps) // steps


def joined(calls: Sequence[TrainCall]) -> TrainCall:
    """Returns consecutive calls as one."""
    leaves = zip(*(call.metrics.Flatten() for call in calls), strict=True)
    return TrainCall(
        step=calls[-1].step,
        num_steps=sum(call.num_steps for call in calls),
        metrics=calls[0].metrics.Pack(np.concatenate(leaf) for leaf in leaves),
        secs=sum(call.secs for call in calls),
        input_wait_secs=sum(call.input_wait_secs for call in calls),
    )


class TrainHook:
    """The base class of hooks; by default every method does nothing.

    The estimator's own hooks are called first, then those given to `train`, in their order.
    """

    def begin(self, step: int) -> None:
        """Called before the first call; `step` steps are done."""

    def after_call(self, call: TrainCall) -> None:
        """Called after every call."""

    def after_save(self, step: int, state: NestedMap) -> None:
        """Called once a save has begun, except for the save of a run that was asked to stop.

        The checkpoint may still be on its way to the disk. The state's arrays are valid only until
        the next call.
        """

    def wants_to_stop(self) -> bool:
        """Returns whether training should save and end.

        Asked before the first call, after every call, and after every `after_save`.
        """
        return False

    def on_stop(self, step: int) -> None:
        """Called after the last save if a hook, in any process, asked training to stop."""

    def end(self) -> None:
        """Called after the last call, also when an error ends the loop."""


class ProgressHook(TrainHook):
    """A progress bar: time left, loss, steps/s, tokens/s, overflow, and steps skipped."""

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self._bar: tqdm.tqdm | None = None
        self._num_skipped = 0

    def begin(self, step: int) -> None:
        self._bar = tqdm.tqdm(
            total=self._max_steps, initial=step, unit="step", desc="train", dynamic_ncols=True
        )

    def after_call(self, call: TrainCall) -> None:
        assert self._bar is not None
        shown = {"loss": f"{call.metrics.loss[-1]:.4f}", "steps/s": f"{call.steps_per_sec:.2f}"}
        if call.tokens_per_sec is not None:
            shown["tokens/s"] = f"{call.tokens_per_sec:.0f}"
        means = call.mean().FlattenItems()
        overflows = [value for path, value in means if "overflow" in path.split(".")]
        if overflows:
            shown["overflow"] = f"{np.mean(overflows):.1%}"
        self._num_skipped += int(np.sum(call.metrics.get("skipped", 0)))
        if self._num_skipped:
            shown["skipped"] = str(self._num_skipped)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(call.num_steps)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
