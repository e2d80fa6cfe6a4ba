"""Stops training on SIGTERM or SIGINT: the current call ends, and its state is saved."""

import os
import signal
import threading
from typing import Self

from lingvo_gshard.train.hooks import TrainHook

# The exit status of a process stopped in this way; in sysexits.h it means "try again later".
EXIT_STATUS = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(TrainHook):
    """Stops training after the call in which SIGTERM or SIGINT arrives; a second one exits at once.

    Use it as a context manager around `train`, in the main thread. A thread reads the signals,
    because Python runs no handler while the main thread is inside a device call or a compilation.
    Then `stopped_at` is the step at which a signal to any of the processes stopped training, which
    is saved unless it is 0; None if no signal did.
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
