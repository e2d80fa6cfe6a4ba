"""Traces programs in a process of their own, which alone imports TensorFlow, and keeps them.

TensorFlow's only work is to trace a function and to lower it to XLA, once. It takes seconds to
import, holds Python's lock while it lowers, and brings an XLA of its own. So a child process does
that work and returns a Program, which JAX compiles and runs here.

~/.cache/lingvo_gshard/programs/NAME-DIGEST.program

DIGEST covers all that a Program depends on: the function that makes it, its arguments, the code of
the library and of the experiment's own classes, and the versions of TensorFlow and JAX. The folder
may be deleted at any time; LINGVO_GSHARD_COMPILATION_CACHE moves it, and `off` keeps nothing.
"""

import atexit
import contextlib
import enum
import hashlib
import inspect
import io
import logging
import multiprocessing
import os
import pathlib
import signal
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from multiprocessing import connection, resource_tracker
from typing import Any, TypeVar

from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.files import child_process, digests
from lingvo_gshard.spmd import environment, program, versions
from lingvo_gshard.spmd.program import Program

# After so long without a request the child ends, and its memory (0.7 GiB and more) is free.
_IDLE_SECS = 60.0
_POLL_SECS = 0.5
_PACKAGES = ("jax", "jaxlib", "tensorflow")
_NAME = "lingvo_gshard-tracer"  # Of the child, and of the file of its messages.
_STOPS = (signal.SIGINT, signal.SIGTERM)
_Result = TypeVar("_Result")


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
    _check_is_no_child()
    kept = _kept_file(function, args)
    if kept is not None:
        # What a power cut has left in the file is noticed by its digest.
        try:
            return program.load(kept, kept.stem)
        except ValueError as error:
            logging.warning("%s It is made again.", error)
        except OSError:  # Mostly there is none. If it cannot be read, it is written again below.
            pass

    made = _child.run(function, args)

    if kept is not None:
        # A full disk or a read-only home costs the next start some seconds, not this one its work.
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            made.save(kept, kept.stem)
        except OSError as error:
            logging.warning("The program %s is not kept: %s", made.name, error)
    return made


def run(function: Callable[..., None], *args: Any) -> None:
    """Calls `function(*args)` in the child process, for what it writes with TensorFlow.

    Nothing is kept. `function` stands at the top of a module, and `args` can be pickled. Raises as
    `traced`.
    """
    _check_is_no_child()
    _child.run(function, args)


def end() -> None:
    """Ends the child now, for whoever traces nothing more soon and needs its memory.

    A later request starts another.
    """
    _child.end()


def _check_is_no_child() -> None:
    """Raises RuntimeError in the child, which imports the main module, and must not run it."""
    if multiprocessing.current_process().name == _NAME:
        raise RuntimeError(
            "The process that traces imports the program's main module, whose work must therefore "
            'stand under `if __name__ == "__main__":`.'
        )


def _kept_file(function: Callable[..., Program], args: tuple[Any, ...]) -> pathlib.Path | None:
    """Returns the file in which this Program is kept; None if the cache is off.

    Also None for Params with a value that their text does not tell from every other.
    """
    folder = environment.cache_folder()
    if folder is None:
        return None
    for arg in args:
        if isinstance(arg, Params) and not all(_is_plain(value) for _, value in arg.Leaves()):
            return None

    # Whatever may change the program must be here: one too few, and an old program would run.
    digest = digests.of_json(
        f"{function.__module__}.{function.__qualname__}",
        [_identity(arg) for arg in args],
        _own_sources(function, args),
        digests.of_library(),
        versions.installed(_PACKAGES),
        os.environ.get("TF_XLA_FLAGS"),
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


def _is_plain(value: Any) -> bool:
    """Returns whether Params.ToText shows all of a value; of a long array it shows the ends."""
    match value:
        case None | bool() | int() | float() | str() | enum.Enum() | type() | types.FunctionType():
            return True
        case tuple() | list():
            return all(map(_is_plain, value))
        case dict():
            return all(map(_is_plain, [*value.keys(), *value.values()]))
        case _:
            return False


def _own_sources(function: Callable[..., Program], args: tuple[Any, ...]) -> list[str]:
    """Returns digests of the files of the function's and an experiment's code outside the library.

    The files of base classes are among them; other modules that they import are not.
    """
    values = [function]
    for arg in args:
        if isinstance(arg, Params):
            values += [value for _, value in arg.Leaves()]

    # A change of a user's layer must not be answered with the program of before.
    sources = set()
    for value in values:
        for code in inspect.getmro(value) if isinstance(value, type) else [value]:
            if getattr(code, "__module__", "lingvo_gshard.").startswith("lingvo_gshard."):
                continue
            with contextlib.suppress(OSError, TypeError):  # Python's own, or typed in.
                source = pathlib.Path(inspect.getfile(code)).read_bytes()
                sources.add(hashlib.sha256(source).hexdigest())
    return sorted(sources)


class _Child:
    """The child process; it starts with the first request and ends when it has long been idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # One request at a time, as TensorFlow would hold the others.
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: connection.Connection | None = None
        self._messages: io.TextIOWrapper | None = None  # What the child writes to standard error.
        self._idle: threading.Timer | None = None

    def run(self, function: Callable[..., _Result], args: tuple[Any, ...]) -> _Result:
        """Returns `function(*args)` of the child; raises as `traced`."""
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()

            try:
                ours = self._connection or self._start()
                ours.send((function, args))
                made, error, cause = _received(ours)
            except (EOFError, ConnectionError) as end:
                raise ChildProcessError(f"{function.__name__}: {self._end()}") from end
            except BaseException:
                # After Ctrl-C, say: its answer would be taken for that of the next request.
                self.stop()
                raise

            self._idle = threading.Timer(_IDLE_SECS, self._stop_idle)
            self._idle.daemon = True
            self._idle.start()

        if error is not None:
            raise error from cause
        return made

    def end(self) -> None:
        """Ends the child once it has answered what it was asked."""
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            self.stop()

    def stop(self) -> None:
        """Ends the child at once, whatever it does; it has nothing on the disk."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        if self._messages is not None:
            self._messages.close()

        self._process = None
        self._connection = None
        self._messages = None

    def _start(self) -> connection.Connection:
        """Starts the child; returns this process's end of the connection to it."""
        descriptor, messages = tempfile.mkstemp(prefix=f"{_NAME}-")
        self._messages = os.fdopen(descriptor, encoding="utf-8", errors="replace")

        # The child needs the file's name at its start alone. Without one, nothing is left behind,
        # however this process ends.
        try:
            return self._start_with(messages)
        finally:
            os.unlink(messages)

    def _start_with(self, messages: str) -> connection.Connection:
        """Starts the child, and returns once it has opened the file of its messages."""
        # Not a fork: this process has threads, and JAX may hold a device.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, messages), name=_NAME, daemon=True
        )

        # Ctrl-C and a scheduler's SIGTERM reach the whole group, but the parent decides when to
        # stop: the child inherits what is blocked here. The tracker, if it started later, would
        # unblock it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        # With the other end in the child alone, its death ends the connection.
        theirs.close()
        _received(self._connection)
        return self._connection

    def _stop_idle(self) -> None:
        # A request that came in the meantime has the lock, and starts a timer of its own.
        if self._lock.acquire(blocking=False):
            self.stop()
            self._lock.release()

    def _end(self) -> str:
        """Returns how the child has ended, and its last words."""
        assert self._process is not None and self._messages is not None
        self._process.join()
        status = self._process.exitcode or 0
        lines = self._messages.read().split("\n")
        self.stop()

        # Until it serves, it writes to this process's standard error.
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        written = [line.strip() for line in lines if line.strip()]
        last = f": {written[-1]}" if written else "; what it wrote, if anything, stands above."
        if status == -signal.SIGKILL:
            last = "; is there enough memory?"
        return f"the process that traces it with TensorFlow has died {how}{last}"


def _received(ours: connection.Connection) -> Any:
    """Waits for what the child sends next; raises EOFError if it has ended."""
    # A wait without an end would not be interrupted by a signal that came just before it.
    while not ours.poll(_POLL_SECS):
        pass
    return ours.recv()


_child = _Child()
# Whatever the child does then, nobody waits for it.
atexit.register(_child.stop)


def _serve(requests: connection.Connection, messages: str) -> None:
    """Answers requests in the child, each by a result or an error, until the parent ends."""
    child_process.end_with_parent()

    # A crash in C++ leaves its reason on the descriptor of standard error.
    with open(messages, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    requests.send("ready")

    # Before anything here starts JAX or imports TensorFlow.
    environment.prepare_tracing()
    while True:
        function, args = requests.recv()
        try:
            requests.send((_run(function, args), None, None))
        except TracingError as error:
            requests.send((None, error, None))
        except Exception as error:
            # --verbosity=1 shows where it comes from, which the error itself does not carry over.
            requests.send((None, error, TracingError(traceback.format_exc())))


def _run(function: Callable[..., _Result], args: tuple[Any, ...]) -> _Result:
    """Runs in the child. Raises only what the parent can read without TensorFlow."""
    try:
        with environment.without_keras():
            import tensorflow  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"Tracing needs TensorFlow, which cannot be imported here ({error}); "
            "`pip install 'lingvo_gshard[train]'`, or `make setup` in a checkout, installs it."
        ) from None

    try:
        return function(*args)
    except (ValueError, OSError, MemoryError):
        raise
    except Exception:
        raise TracingError(traceback.format_exc()) from None
