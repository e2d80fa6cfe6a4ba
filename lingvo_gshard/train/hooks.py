"""Hooks of the training loop: their interface, a progress bar, checks of the loss, and signals."""

import dataclasses
import enum
import logging
import os
import signal
import threading
from collections.abc import Sequence
from typing import Self

import numpy as np
import tqdm

from lingvo_gshard.core.nested_map import NestedMap

# The exit status of a process that StopOnSignal stopped; in sysexits.h it means "try again later".
EXIT_STATUS = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Optional metrics of a step: 1.0 if it left the weights unchanged, and norms by layer.
_SKIPPED = "skipped"
_NORMS_BY_LAYER = ("activation_norms", "gradient_norms")


@dataclasses.dataclass(frozen=True)
class TrainCall:
    """One call of the train program."""

    step: int  # The number of steps done after the call.
    num_steps: int  # K, the number of steps in the call.
    metrics: NestedMap  # numpy arrays [K, ...], `loss` among them.
    # Since the previous call ended, with the wait for input; the first call, and the first one
    # after a checkpoint, count from their own start.
    secs: float
    input_wait_secs: float = 0.0  # The part of `secs` in which the devices waited for input.

    @property
    def steps_per_sec(self) -> float:
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
    first, *others = (call.metrics for call in calls)
    return dataclasses.replace(
        calls[-1],
        num_steps=sum(call.num_steps for call in calls),
        metrics=first.Transform(lambda *leaf: np.concatenate(leaf), *others),
        secs=sum(call.secs for call in calls),
        input_wait_secs=sum(call.input_wait_secs for call in calls),
    )


class TrainHook:
    """The base class of hooks, which do nothing by default. The estimator's own come first."""

    def begin(self, step: int) -> None:
        """Called before the first call; `step` steps are done."""

    def after_call(self, call: TrainCall) -> None:
        """Called after every call."""

    def after_save(self, step: int, state: NestedMap) -> None:
        """Called once a save has begun, unless training stops; arrays last until the next call."""

    def wants_to_stop(self) -> bool:
        """Returns whether training should save and end; asked before and after calls and saves."""
        return False

    def on_stop(self, step: int) -> None:
        """Called after the last save if a hook, in any process, asked training to stop."""

    def end(self) -> None:
        """Called after the last call, also when an error ends the loop."""


class ProgressHook(TrainHook):
    """A progress bar: time left, loss, steps/s, tokens/s, overflow, and steps skipped."""

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self._bar = tqdm.tqdm(disable=True)
        self._num_skipped = 0

    def begin(self, step: int) -> None:
        self._bar = tqdm.tqdm(
            total=self._max_steps, initial=step, unit="step", desc="train", dynamic_ncols=True
        )

    def after_call(self, call: TrainCall) -> None:
        shown = {"loss": f"{call.metrics.loss[-1]:.4f}", "steps/s": f"{call.steps_per_sec:.2f}"}
        if call.tokens_per_sec is not None:
            shown["tokens/s"] = f"{call.tokens_per_sec:.0f}"
        means = call.mean().FlattenItems()
        overflows = [value for path, value in means if "overflow" in path.split(".")]
        if overflows:
            shown["overflow"] = f"{np.mean(overflows):.1%}"
        self._num_skipped += int(np.sum(call.metrics.get(_SKIPPED, 0)))
        if self._num_skipped:
            shown["skipped"] = str(self._num_skipped)
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(call.num_steps)

    def end(self) -> None:
        self._bar.close()


class NonFinite(enum.Enum):
    """STOP ends training with an error; SKIP logs a warning and continues. See NonFiniteHook."""

    STOP = "stop"
    SKIP = "skip"


class NonFiniteLossError(FloatingPointError):
    """A loss or gradient became infinite or not a number after the last checkpoint."""


class NonFiniteHook(TrainHook):
    """Checks every call. SKIP needs a model_fn that skips the update and sets `skipped` to 1."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self._num_skipped = 0
        self._step_saved = 0

    def begin(self, step: int) -> None:
        self._step_saved = step

    def after_save(self, step: int, state: NestedMap) -> None:
        self._step_saved = step

    def after_call(self, call: TrainCall) -> None:
        """Raises NonFiniteLossError or logs the first step that is not finite, with its layers."""
        skipped = np.asarray(call.metrics.get(_SKIPPED, 0.0)) > 0.0
        bad = np.flatnonzero(~np.isfinite(call.metrics.loss) | skipped)
        if not bad.size:
            return
        k = int(bad[0])
        step = call.step - call.num_steps + 1 + k
        message = f"The loss of step {step} is {call.metrics.loss[k]}"
        if layers := _first_bad_layers(call.metrics, k):
            message += f", first in {' and '.join(layers)}"
        if self._policy is NonFinite.STOP:
            last = f"the last checkpoint is of step {self._step_saved}"
            raise NonFiniteLossError(
                f"{message}; {last if self._step_saved else 'nothing was saved'}."
            )
        if _SKIPPED not in call.metrics:
            raise ValueError(
                f"{message}; to skip such steps, model_fn must leave the state unchanged and set "
                f"its metric {_SKIPPED!r} to 1."
            )
        self._num_skipped += bad.size
        logging.warning("%s; skipped, %d steps in this run so far.", message, self._num_skipped)


def _first_bad_layers(metrics: NestedMap, k: int) -> list[str]:
    """Returns the first bad layer of each stack, such as `encoder_1 (activation_norms)`."""
    for name in _NORMS_BY_LAYER:
        first: dict[str, tuple[int, str]] = {}
        for layer, norms in metrics.get(name, NestedMap()).items():
            stack, _, index = layer.rpartition("_")
            # A layer without an index, such as `softmax`, is a stack of its own.
            stack, position = (stack, int(index)) if index.isdigit() else (layer, 0)
            if not np.isfinite(norms[k]):
                first[stack] = min((position, layer), first.get(stack, (position, layer)))
        if first:
            return [f"{layer} ({name})" for _, layer in first.values()]
    return []


class StopOnSignal(TrainHook):
    """Stops training after the call in which SIGTERM or SIGINT arrives; a second one exits at once.

    Use it as a context manager around `train`, in the main thread. A thread reads the signals,
    because Python runs no handler while the main thread is inside a device call or a compilation.
    Afterwards `stopped_at` is the step at which a signal to any process, or another hook, stopped
    training; None if it ran to its end. The step is saved unless it is 0.
    """

    def __init__(self) -> None:
        self.stopped_at: int | None = None
        self._requested = False

    def __enter__(self) -> Self:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        self._handlers = {number: signal.signal(number, self._request) for number in _SIGNALS}
        self._writer_before = signal.set_wakeup_fd(self._writer)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._writer_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._writer)

    def wants_to_stop(self) -> bool:
        return self._requested

    def on_stop(self, step: int) -> None:
        self.stopped_at = step

    def _request(self, *_: object) -> None:
        self._requested = True

    def _listen(self, reader: int) -> None:
        """Reads the number of each signal until __exit__; exits at the second signal."""
        first = None
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in _SIGNALS:
                    continue
                if first is not None:
                    os._exit(128 + number[0])  # A shell's status for that signal.
                first = signal.Signals(number[0])
                self._request()
                what = "training stops after this call; a second signal ends it at once."
                os.write(2, f"\n{first.name}: {what}\n".encode())
