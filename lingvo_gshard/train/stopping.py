"""A run that is asked to end: it finishes the call under way and saves."""

from __future__ import annotations

import os
import signal
import threading

from lingvo_gshard.train.hooks import TrainHook

# The exit status of a process that ended so: try again later (sysexits.h).
EXIT_STATUS = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainHook):
    """Stops training after the call in which SIGTERM or SIGINT came; a second one ends at once.

    Use as a context manager around train, in the main thread. Both hold while that thread is in a
    call of the devices or a compilation: Python itself would hear of neither before its end.

    Attributes:
      stopped_at: the step that was saved, 0 if none was done, once training has stopped early, in
        whichever process the signal came; None otherwise.
    """

    def __init__(self) -> None:
        self.stopped_at: int | None = None
        self._asked = False

    def __enter__(self) -> StopOnSignal:
        heard, self._tells = os.pipe()
        os.set_blocking(self._tells, False)
        threading.Thread(target=self._listen, args=(heard,), name="signals", daemon=True).start()
        self._handlers = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        self._tells_before = signal.set_wakeup_fd(self._tells)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._tells_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._tells)

    def wants_to_stop(self) -> bool:
        return self._asked

    def on_stop(self, step: int) -> None:
        self.stopped_at = step

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _listen(self, heard: int) -> None:
        """Reads the number of each signal as it comes, until __exit__; ends at the second."""
        first = None
        with os.fdopen(heard, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in _SIGNALS:
                    continue
                if first is not None:
                    os._exit(128 + number[0])  # As a shell tells of it.
                first = signal.Signals(number[0])
                self._ask()
                os.write(
                    2, f"\n{first.name}: training stops after this call; again: now.\n".encode()
                )
