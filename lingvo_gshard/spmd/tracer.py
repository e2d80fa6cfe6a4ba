"""Programs from a process of their own, which alone imports TensorFlow, and kept for the next time.

TensorFlow's only work is to trace a function and to lower it to XLA, once. It takes seconds to
import, holds Python's lock while it lowers, and brings an XLA of its own. So a child process does
that work and returns a Program, which JAX compiles and runs here.

~/.cache/lingvo_gshard/programs/NAME-DIGEST.program

DIGEST covers all that a Program depends on: the function that makes it, its arguments, the code of
the library and of the experiment's own classes, and the versions of TensorFlow and JAX. The folder
may be deleted at any time; LINGVO_GSHARD_COMPILATION_CACHE moves it, and `off` keeps nothing.
"""

import concurrent.futures
import contextlib
import hashlib
import inspect
import logging
import multiprocessing
import os
import pathlib
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import child_process, digests
from lingvo_gshard.spmd import environment, program, versions
from lingvo_gshard.spmd.program import Program

# After so long without a request the child ends, and its memory (0.7 GiB and more) is free.
_IDLE_SECS = 60.0
_PACKAGES = ("jax", "jaxlib", "tensorflow")


class TracingError(RuntimeError):
    """A failure of TensorFlow or JAX in the child; the text holds the child's traceback."""


def traced(function: Callable[..., Program], *args: Any) -> Program:
    """Returns `function(*args)`: the Program that was kept, or a new one of the child process.

    `function` stands at the top of a module, and each of `args` is Params, a NestedMap, or a value
    whose repr identifies it, such as a frozen dataclass, an enum or a number. A kept Program that
    is damaged is made again, with a warning.

    Raises ValueError as the function does, or if TensorFlow cannot be imported; ChildProcessError
    if the child dies; and TracingError for any other failure of the child.
    """
    kept = _kept_file(function, args)

    # What a power cut has left in the file is noticed by its digest.
    if kept is not None and kept.exists():
        try:
            return program.load(kept)
        except ValueError as error:
            logging.warning("%s It is made again.", error)

    made = _child.run(function, args)

    if kept is not None:
        # A full disk or a read-only home costs the next start some seconds, not this one its work.
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            made.save(kept)
        except OSError as error:
            logging.warning("The program %s is not kept: %s", made.name, error)
    return made


def _kept_file(function: Callable[..., Program], args: tuple[Any, ...]) -> pathlib.Path | None:
    """Returns the file in which this Program is kept; None if the cache is off."""
    folder = environment.cache_folder()
    if folder is None:
        return None

    # Whatever may change the program must be here: one too few, and an old program would run.
    digest = digests.of_json(
        f"{function.__module__}.{function.__qualname__}",
        [_identity(arg) for arg in args],
        sorted(set().union(*(_own_sources(arg) for arg in args))),
        digests.of_library(),
        versions.installed(_PACKAGES),
    )
    return folder / "programs" / f"{function.__name__}-{digest[:32]}.program"


def _identity(arg: Any) -> str:
    """Returns a text that is the same for equal arguments, and in every process."""
    match arg:
        case Params():
            return arg.ToText()
        case NestedMap():
            return repr(arg.FlattenItems())
        case _:
            return repr(arg)


def _own_sources(arg: Any) -> set[str]:
    """Returns digests of the files that define an experiment's classes outside the library."""
    if not isinstance(arg, Params):
        return set()

    # A change of a user's layer must not be answered with the program of before.
    sources = set()
    for _, value in arg.Leaves():
        if isinstance(value, type) and not value.__module__.startswith("lingvo_gshard."):
            with contextlib.suppress(OSError, TypeError):  # A class of Python's own, or typed in.
                source = pathlib.Path(inspect.getfile(value)).read_bytes()
                sources.add(hashlib.sha256(source).hexdigest())
    return sources


class _Child:
    """The child process; it starts with the first request and ends when it has long been idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # One request at a time, as TensorFlow would hold the others.
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._messages = ""  # The file of the child's standard error.
        self._idle: threading.Timer | None = None

    def run(self, function: Callable[..., Program], args: tuple[Any, ...]) -> Program:
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            pool = self._pool or self._start()

            # An exception of the function is raised here as well.
            try:
                return pool.submit(_run, function, args).result()
            except BrokenProcessPool as error:
                self._stop()
                raise ChildProcessError(
                    f"{function.__name__}: the process that traces it with TensorFlow has died"
                    f"{self._last_words()}"
                ) from error
            finally:
                self._idle = threading.Timer(_IDLE_SECS, self._end_idle)
                self._idle.daemon = True
                self._idle.start()

    def _start(self) -> concurrent.futures.ProcessPoolExecutor:
        descriptor, self._messages = tempfile.mkstemp(prefix="lingvo_gshard-tracer-")
        os.close(descriptor)
        self._pool = concurrent.futures.ProcessPoolExecutor(
            max_workers=1,
            # Not a fork: this process has threads, and JAX may hold a device.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(self._messages,),
        )
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _end_idle(self) -> None:
        # A request that came in the meantime has the lock, and starts a timer of its own.
        if self._lock.acquire(blocking=False):
            self._stop()
            pathlib.Path(self._messages).unlink(missing_ok=True)
            self._lock.release()

    def _last_words(self) -> str:
        """Returns the last line that the dead child wrote to standard error, if any."""
        lines = pathlib.Path(self._messages).read_text(errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return f": {written[-1]}" if written else "; it wrote nothing. Is there enough memory?"


_child = _Child()


def _prepare(messages: str) -> None:
    """Prepares the child, before anything in it starts JAX or imports TensorFlow."""
    child_process.end_with_parent()
    # The parent decides when to stop; Ctrl-C and a scheduler's SIGTERM reach the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    # A crash in C++ leaves its reason on the descriptor of standard error.
    with open(messages, "w") as file:
        os.dup2(file.fileno(), 2)

    environment.prepare_tracing()


def _run(function: Callable[..., Program], args: tuple[Any, ...]) -> Program:
    """Runs in the child. Raises only what the parent can read without TensorFlow."""
    try:
        with environment.without_keras():
            import tensorflow  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"Tracing needs TensorFlow, which cannot be imported here ({error}); "
            "`pip install tensorflow`, or `make setup` in a checkout, installs it."
        ) from None

    try:
        return function(*args)
    except (ValueError, OSError, MemoryError):
        raise
    except Exception:
        raise TracingError(traceback.format_exc()) from None
