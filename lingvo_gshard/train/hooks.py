"""Hooks of the training loop, and the progress bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tqdm

from lingvo_gshard.core.nested_map import NestedMap


@dataclasses.dataclass(frozen=True)
class TrainCall:
    """One call of the train program.

    Attributes:
      step: steps done after it.
      num_steps: K, how many of them it did.
      metrics: numpy arrays [K, ...], `loss` among them.
      secs: from the end of the call before to this one's, waiting for input included; from its
        own start where it is the first, or the first after a checkpoint.
      input_wait_secs: how much of `secs` the devices waited for this call's batches.
    """

    step: int
    num_steps: int
    metrics: NestedMap
    secs: float
    input_wait_secs: float = 0.0

    @property
    def steps_per_sec(self) -> float:
        """Training steps a second."""
        return self.num_steps / self.secs

    @property
    def tokens_per_sec(self) -> float | None:
        """Target tokens a second; None if the model doesn't count them as `num_tokens`."""
        if "num_tokens" not in self.metrics:
            return None
        return float(np.sum(self.metrics.num_tokens)) / self.secs

    def mean(self) -> NestedMap:
        """Each metric's mean over the steps, float64."""
        return self.metrics.Transform(lambda value: np.mean(value, axis=0, dtype=np.float64))

    def reaches_multiple_of(self, steps: int) -> bool:
        """Whether one of this call's steps is a multiple of `steps`."""
        return self.step // steps > (self.step - self.num_steps) // steps


def joined(calls: Sequence[TrainCall]) -> TrainCall:
    """Consecutive calls as one."""
    leaves = zip(*(call.metrics.Flatten() for call in calls), strict=True)
    return TrainCall(
        step=calls[-1].step,
        num_steps=sum(call.num_steps for call in calls),
        metrics=calls[0].metrics.Pack(np.concatenate(leaf) for leaf in leaves),
        secs=sum(call.secs for call in calls),
        input_wait_secs=sum(call.input_wait_secs for call in calls),
    )


class TrainHook:
    """What happens besides training. Every method may be left as it is.

    The estimator's own hooks come first, then those given to train, in their order.
    """

    def begin(self, step: int) -> None:
        """Before the first call, `step` steps done."""

    def after_call(self, call: TrainCall) -> None:
        """After every call."""

    def after_save(self, step: int, state: NestedMap) -> None:
        """After every checkpoint but the one of a stop, which may still be under way to the disk.

        The state's arrays live until the next call only.
        """

    def wants_to_stop(self) -> bool:
        """Asked before the first call, after each, and after each `after_save`.

        Returns:
          Whether training shall save and end.
        """
        return False

    def on_stop(self, step: int) -> None:
        """Once training has ended at `step`, saved, because a hook of some process wanted it."""

    def end(self) -> None:
        """After the last call, also when an error ends the loop."""


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
        overflows = [
            value for path, value in call.mean().FlattenItems() if "overflow" in path.split(".")
        ]
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
