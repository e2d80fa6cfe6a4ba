"""A hook whose work is done beside training, in a thread of its own."""

from __future__ import annotations

import queue
import threading

from lingvo_gshard.train.hooks import TrainCall, TrainHook

_MAX_WAITING_CALLS = 100


class BackgroundHook(TrainHook):
    """Hands every call to another hook in order; what that raises is raised at the next call.

    Only for hooks that write: `after_save` is not handed on, since the state's arrays live until
    the next call only.
    """

    def __init__(self, hook: TrainHook) -> None:
        self._hook = hook
        self._calls: queue.Queue[TrainCall | None] = queue.Queue(_MAX_WAITING_CALLS)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        self._hook.begin(step)
        self._thread = threading.Thread(target=self._run, name="background_hook", daemon=True)
        self._thread.start()

    def after_call(self, call: TrainCall) -> None:
        self._raise()
        self._calls.put(call)

    def end(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
        self._hook.end()
        self._raise()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._error is None:  # After an error, the rest is only taken out of the way.
                try:
                    self._hook.after_call(call)
                except BaseException as error:  # The training thread shall raise it.
                    self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
