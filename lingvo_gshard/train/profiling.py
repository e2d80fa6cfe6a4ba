"""A hook that traces some of the training steps, by whole calls of the device program.

model_dir/train/plugins/profile/    the traces, where TensorBoard looks for them
"""

import dataclasses
import pathlib
from collections.abc import Callable

from lingvo_gshard.spmd import traces
from lingvo_gshard.spmd.executable import Executable
from lingvo_gshard.train.hooks import TrainCall, TrainHook


@dataclasses.dataclass(frozen=True)
class ProfiledCall:
    """A call in a trace."""

    steps: range
    executable: Executable
    input_wait_secs: float  # How long the devices waited for the call's input.

    @property
    def number(self) -> int:
        """The call's last step, by which the trace identifies it."""
        return self.steps.stop - 1


@dataclasses.dataclass(frozen=True)
class Profile:
    """A trace of consecutive calls."""

    asked: range  # The requested steps.
    calls: tuple[ProfiledCall, ...]
    path: pathlib.Path  # The .xplane.pb; see spmd/traces.py.


class ProfileHook(TrainHook):
    """Traces the calls with any step of `asked`, and then calls `report` with the profile.

    If training ends earlier, the profile has the calls up to then. The time of writing a trace
    counts in the next call.
    """

    def __init__(
        self, asked: range, model_dir: str | pathlib.Path, report: Callable[[Profile], None]
    ) -> None:
        self._asked = asked
        self._folder = pathlib.Path(model_dir, "train")
        self._report = report
        self._is_tracing = False
        self._upcoming: tuple[range, Executable] | None = None
        self._calls: list[ProfiledCall] = []

    def before_call(self, steps: range, executable: Executable) -> None:
        if steps.stop <= self._asked.start or self._asked.stop <= steps.start:
            return
        if not self._is_tracing:
            traces.start(self._folder)
            self._is_tracing = True
        self._upcoming = (steps, executable)

    def after_call(self, call: TrainCall) -> None:
        if not self._is_tracing or self._upcoming is None:
            return
        steps, executable = self._upcoming
        self._calls.append(ProfiledCall(steps, executable, call.input_wait_secs))
        if call.step >= self._asked[-1]:
            self._finish()

    def end(self) -> None:
        if self._is_tracing:
            self._finish()

    def _finish(self) -> None:
        self._is_tracing = False
        path = traces.stop(self._folder)
        if self._calls:  # Empty if an error ended the first call.
            self._report(Profile(self._asked, tuple(self._calls), path))
