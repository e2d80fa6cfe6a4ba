"""Progress: what a program does while a user would wait in silence, and how long it still takes.

    with progress.shown("evaluating dev", total=13, unit="batches") as done:
        for batch in batches:
            ...
            done.update()

Nothing is shown within the first two seconds. After that, a terminal has a bar, or a clock if there
is nothing to count, and a notebook a widget; a file or a pipe gets a line from time to time. All of
it goes to standard error. LINGVO_GSHARD_PROGRESS=off hides it.
"""

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import tqdm

BYTES = "B"  # A unit that is shown as kB, MB, GB.
_VARIABLE = "LINGVO_GSHARD_PROGRESS"
_QUIET_SECS = 2.0  # A shorter wait is not worth a line.
_BAR_SECS = 0.5  # Between two pictures of a bar.
_LINE_SECS = 10.0  # Between two lines, at first; later a tenth of the time so far.
_CLOCK = "{desc}: {elapsed}"
_COUNT_LINE = "{desc}: {n_fmt}{unit}, {elapsed} so far{postfix}"
_SHARE_LINE = "{desc}: {n_fmt}/{total_fmt}{unit}, {elapsed} so far, {remaining} left{postfix}"

_is_hidden = False
_visible: list["Progress"] = []  # In the order of their first views.


def hide() -> None:
    """Hides all progress of this process from now on, as another process shows the same."""
    global _is_hidden
    _is_hidden = True


class Progress:
    """Work that is under way; see `shown`."""

    def __init__(self, doing: str, total: int | None, unit: str, first: int, stays: bool) -> None:
        self.doing = doing
        self.total = total
        self.unit = unit
        self.first = first
        self.stays = stays
        self.done = first
        self.facts: dict[str, str] = {}
        self.began = time.time()
        # The count and the time of the first update. The time before it, such as a compilation,
        # says nothing about the time left.
        self.first_update: tuple[int, float] | None = None
        self._lock = threading.Lock()

    def update(self, count: int = 1, secs: float | None = None, **facts: str) -> None:
        """Adds to the count of finished units, and replaces the facts beside it; in any thread.

        `secs` is the time that these units took, if the caller knows it.
        """
        with self._lock:
            self.done += count
            if facts:
                self.facts = facts
            if self.first_update is None and secs is not None:
                self.first_update = (self.done - count, time.time() - secs)
            elif self.first_update is None:
                self.first_update = (self.done, time.time())

    @property
    def rate(self) -> float | None:
        """Units a second, without the time before the first update; None if it is not known yet."""
        if self.first_update is None or self.done == self.first_update[0]:
            return None
        count, secs = self.first_update
        return (self.done - count) / (time.time() - secs)


@contextlib.contextmanager
def shown(
    doing: str,
    *,
    total: int | None = None,
    unit: str = "",
    first: int = 0,
    stays: bool = False,
    enabled: bool = True,
) -> Iterator[Progress]:
    """Shows that a program is `doing` something, until the context ends; yields its progress.

    Args:
      doing: The work, such as "evaluating dev".
      total: The number of all units; None without a number, or if it is not known.
      unit: The name of the units, in plural, or BYTES; "" if nothing is counted.
      first: The number of units that an earlier process has done.
      stays: Whether the last state stays on the terminal.
      enabled: False shows nothing.
    """
    progress = Progress(doing, total, unit, first, stays)
    if not enabled or _is_hidden or os.environ.get(_VARIABLE) == "off":
        yield progress
        return

    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(progress, ended), name="progress", daemon=True)
    watcher.start()
    try:
        yield progress
    finally:
        ended.set()
        watcher.join()


def _watch(progress: Progress, ended: threading.Event) -> None:
    """Shows the progress again and again, until it has ended."""
    if ended.wait(_QUIET_SECS):
        return
    view = _view(progress)
    _visible.append(progress)
    while not ended.wait(view.show()):
        pass
    _visible.remove(progress)
    view.end()


class _View(Protocol):
    """Where progress is shown."""

    def show(self) -> float:
        """Shows the current state; returns the seconds to the next time."""

    def end(self) -> None:
        """Shows the last state, or removes it."""


def _view(progress: Progress) -> _View:
    if _is_notebook() or sys.stderr.isatty():
        return _Bar(progress)
    return _Lines(progress)


class _Bar:
    """A bar on a terminal, or a widget in a notebook."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        has_count = bool(progress.unit)
        is_bytes = progress.unit == BYTES
        self._bar: Any = _bar_class(progress)(
            desc=progress.doing,
            total=progress.total,
            initial=progress.first,
            unit=progress.unit if is_bytes else f" {progress.unit}",
            unit_scale=is_bytes,
            dynamic_ncols=True,
            leave=progress.stays,
            bar_format=None if has_count else _CLOCK,
        )
        self._bar.start_t = progress.began

    def show(self) -> float:
        progress = self._progress
        self._bar.n = progress.done
        self._bar.set_postfix(progress.facts)
        return _BAR_SECS

    def end(self) -> None:
        self.show()
        self._bar.close()


class _Lines:
    """Lines from time to time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._told: int | None = None  # The count in the last line.

    def show(self) -> float:
        # What waits for something that began later leaves the lines to that.
        if self._progress is _visible[-1]:
            self._tell()
        elapsed = time.time() - self._progress.began
        return max(_LINE_SECS, elapsed / 10)

    def end(self) -> None:
        if self._progress.unit and self._told != self._progress.done:
            self._tell()

    def _tell(self) -> None:
        progress = self._progress
        is_bytes = progress.unit == BYTES
        if not progress.unit:
            form = f"{_CLOCK} so far"
        else:
            form = _COUNT_LINE if progress.total is None else _SHARE_LINE
        line = tqdm.tqdm.format_meter(
            progress.done,
            progress.total,
            time.time() - progress.began,
            prefix=progress.doing,
            unit=progress.unit if is_bytes else f" {progress.unit}",
            unit_scale=is_bytes,
            rate=progress.rate,
            bar_format=form,
            postfix=", ".join(f"{name}={value}" for name, value in progress.facts.items()),
            initial=progress.first,
        )
        print(line, file=sys.stderr, flush=True)
        self._told = progress.done


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


def _bar_class(progress: Progress) -> type:
    """Returns tqdm's class: a widget in a notebook with ipywidgets, otherwise a line of text."""
    if _is_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm import notebook

        return type("Widget", (_WithRate, notebook.tqdm), {"progress": progress})
    return type("Bar", (_WithRate, tqdm.tqdm), {"progress": progress})


class _WithRate:
    """Replaces tqdm's rate, which counts what precedes the first update, by ours."""

    progress: Progress

    @property
    def format_dict(self) -> dict[str, Any]:
        """See tqdm."""
        facts: dict[str, Any] = super().format_dict  # type: ignore[misc]
        return facts | {"rate": self.progress.rate}
