"""Hooks of the training loop: their interface, a progress bar, checks of the loss, and signals."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.train.metrics_files import stack_and_position
from xla_spmd.runtime import progress

# The settings import this module, and must be checked before JAX is imported.
if TYPE_CHECKING:
    from lingvo_gshard.spmd.executable import Executable

# The exit status of a process stopped by StopOnSignal; sysexits.h defines it as "try again later".
EXIT_STATUS = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # Sent by a scheduler, and by Ctrl-C.
# Optional metrics of a step.
_SKIPPED = "skipped"  # 1.0 if the step left the weights unchanged.
_NORMS_BY_LAYER = ("activation_norms", "gradient_norms")  # Each has [K] by layer.


@dataclasses.dataclass(frozen=True)
class TrainCall:
    """One call of the train program."""

    step: int  # The number of steps done after the call.
    num_steps: int  # K, the number of steps in the call.
    metrics: NestedMap  # numpy arrays [K, ...], including `loss`.
    # Counted from the end of the previous call, so that it includes the wait for input. The first
    # call, and the first call after a checkpoint, count from their own start.
    secs: float
    input_wait_secs: float = 0.0  # The part of `secs` in which the devices waited for input.
    # If the model_fn has a host_call: its `tensors`, numpy arrays [K, ...], in a list or by name.
    host_call: NestedMap = dataclasses.field(default_factory=NestedMap)

    @property
    def steps_per_sec(self) -> float:
        return self.num_steps / self.secs

    @property
    def tokens_per_sec(self) -> float | None:
        """Target tokens per second; None if the model lacks the metric `num_tokens`."""
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
    """Returns consecutive calls as one call, with the metrics of all their steps."""
    first, *others = (call.metrics for call in calls)
    return dataclasses.replace(
        calls[-1],
        num_steps=sum(call.num_steps for call in calls),
        metrics=first.Transform(lambda *leaf: np.concatenate(leaf), *others),
        secs=sum(call.secs for call in calls),
        input_wait_secs=sum(call.input_wait_secs for call in calls),
    )


class TrainHook:
    """The base class of hooks, which do nothing by default. The estimator's own hooks run first."""

    def begin(self, step: int) -> None:
        """Runs before the first call, when `step` steps are done."""

    def before_call(self, steps: range, executable: Executable) -> None:
        """Runs before every call, which will do `steps`; its input is ready."""

    def after_call(self, call: TrainCall) -> None:
        """Runs after every call."""

    def after_save(self, step: int, state: NestedMap) -> None:
        """Runs when a save has begun, unless training stops; `state` lasts until the next call."""

    def wants_to_stop(self) -> bool:
        """Returns whether training should save and end; called before and after calls and saves."""
        return False

    def is_complete(self) -> bool:
        """Returns whether training is over, as at max_steps; called when wants_to_stop is."""
        return False

    def on_stop(self, step: int) -> None:
        """Runs after the last save if a hook, in any process, requested a stop."""

    def end(self) -> None:
        """Runs after the last call, even if an error ends the loop."""


class ProgressHook(TrainHook):
    """A progress bar: time left, loss, steps/s, tokens/s, overflow, and steps skipped."""

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self._num_skipped = 0
        self._shown = contextlib.ExitStack()  # Holds the bar until the end.
        self._done: progress.Progress | None = None

    def begin(self, step: int) -> None:
        shown = progress.shown(
            "training", total=self._max_steps, unit="steps", first=step, stays=True
        )
        self._done = self._shown.enter_context(shown)

    def after_call(self, call: TrainCall) -> None:
        shown = {"loss": f"{call.metrics.loss[-1]:.4f}", "steps/s": f"{call.steps_per_sec:.2f}"}
        if call.tokens_per_sec is not None:
            shown["tokens/s"] = f"{call.tokens_per_sec:.0f}"

        # The mean share of dropped tokens over the MoE layers; a dense model lacks this metric.
        means = call.mean().FlattenItems()
        overflows = [value for path, value in means if "overflow" in path.split(".")]
        if overflows:
            shown["overflow"] = f"{np.mean(overflows):.1%}"

        self._num_skipped += int(np.sum(call.metrics.get(_SKIPPED, 0)))
        if self._num_skipped:
            shown["skipped"] = str(self._num_skipped)

        assert self._done is not None
        self._done.update(call.num_steps, call.secs, **shown)

    def end(self) -> None:
        self._shown.close()


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
        self._step_saved = 0  # The last checkpoint's step; 0 before the first checkpoint.

    def begin(self, step: int) -> None:
        self._step_saved = step

    def after_save(self, step: int, state: NestedMap) -> None:
        self._step_saved = step

    def after_call(self, call: TrainCall) -> None:
        """Raises NonFiniteLossError or logs the first step that is not finite, with its layers.

        Raises ValueError if such steps should be skipped, but the model does not skip them.
        """
        # A step may also be skipped because of its gradients, with a finite loss.
        skipped = np.asarray(call.metrics.get(_SKIPPED, 0.0)) > 0.0
        bad = np.flatnonzero(~np.isfinite(call.metrics.loss) | skipped)
        if not bad.size:
            return

        # Only the first step is of interest: later ones are a consequence.
        first_bad = int(bad[0])
        step = call.step - call.num_steps + 1 + first_bad
        message = f"The loss of step {step} is {call.metrics.loss[first_bad]}"
        layers = _first_bad_layers(call.metrics, first_bad)
        if layers:
            message += f", first in {' and '.join(layers)}"

        if self._policy is NonFinite.STOP:
            saved = "nothing was saved"
            if self._step_saved:
                saved = f"the last checkpoint is of step {self._step_saved}"
            raise NonFiniteLossError(f"{message}; {saved}.")
        if _SKIPPED not in call.metrics:
            raise ValueError(
                f"{message}; to skip such steps, model_fn must leave the state unchanged and set "
                f"its metric {_SKIPPED!r} to 1."
            )
        self._num_skipped += bad.size
        logging.warning("%s; skipped, %d steps in this run so far.", message, self._num_skipped)


def _first_bad_layers(metrics: NestedMap, k: int) -> list[str]:
    """Returns the first bad layer of each stack in step k, as `encoder_1 (activation_norms)`."""
    # Activations come first: a loss that is not finite makes all layers' gradients bad.
    for name in _NORMS_BY_LAYER:
        first: dict[str, tuple[int, str]] = {}
        for layer, norms in metrics.get(name, NestedMap()).items():
            if np.isfinite(norms[k]):
                continue
            stack, position = stack_and_position(layer)
            if stack not in first or (position, layer) < first[stack]:
                first[stack] = (position, layer)
        if first:
            return [f"{layer} ({name})" for _, layer in first.values()]
    return []


class StopOnSignal(TrainHook):
    """Stops training after the call in which SIGTERM or SIGINT arrives; a second one exits at once.

    Use it as a context manager around `train`; it catches signals only in the main thread. Another
    thread reads them, because Python does not run handlers while the main thread is inside a device
    call or a compilation. Afterwards, `stopped_at` is the step at which a signal to any process, or
    another hook, stopped training, or None if training ran to its end. This step is saved unless it
    is 0.
    """

    def __init__(self) -> None:
        self.stopped_at: int | None = None
        self._requested = False  # Set by a signal, in this thread or in the other.
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python allows handlers only in the main thread, and not in a server's worker, say.
        if threading.current_thread() is not threading.main_thread():
            return self

        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # signal.set_wakeup_fd requires this.
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()

        # Python's handler in C writes the number of each signal to the pipe, at any time.
        self._handlers = {number: signal.signal(number, self._request) for number in _SIGNALS}
        self._writer_before = signal.set_wakeup_fd(self._writer)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._handlers:
            return

        # The order is reversed, so that a signal is never written to a closed pipe.
        signal.set_wakeup_fd(self._writer_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._writer)  # Ends the other thread.

    def wants_to_stop(self) -> bool:
        return self._requested

    def on_stop(self, step: int) -> None:
        self.stopped_at = step

    def _request(self, *_: object) -> None:
        self._requested = True

    def _listen(self, reader: int) -> None:
        """Reads the number of each signal until __exit__; exits at the second signal."""
        is_second = False
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while byte := numbers.read(1):
                number = byte[0]
                if number not in _SIGNALS:
                    continue
                if is_second:
                    os._exit(128 + number)  # A shell's status for that signal.

                self._request()
                name = signal.Signals(number).name
                notice = "training stops after this call; a second signal ends it at once."
                os.write(2, f"\n{name}: {notice}\n".encode())
                is_second = True
