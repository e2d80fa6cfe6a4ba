"""A run that is asked to end: it finishes the call under way and saves."""

from __future__ import annotations

import signal
from types import FrameType

from lingvo_gshard.train.hooks import TrainHook

# The exit status of a process that ended so: try again later (sysexits.h).
EXIT_STATUS = 75


class StopOnSignal(TrainHook):
    """Stops training after the call in which SIGTERM came; a second SIGTERM ends at once.

    Use as a context manager around train, in the main thread.

    Attributes:
      stopped_at: the step that was saved, once training has stopped early, in whichever process
        the signal came; None otherwise.
    """

    def __init__(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.stopped_at: int | None = None
        self._number, self._asked = number, False

    def __enter__(self) -> StopOnSignal:
        self._before = signal.signal(self._number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(self._number, self._before)

    def wants_to_stop(self) -> bool:
        return self._asked

    def on_stop(self, step: int) -> None:
        self.stopped_at = step

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(self._number, signal.SIG_DFL)
