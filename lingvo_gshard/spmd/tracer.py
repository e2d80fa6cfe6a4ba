"""Traces programs in a child process, the only one to import TensorFlow, and caches them.

TensorFlow's only work is to trace a function and to lower it to XLA, once. Its import takes
seconds, it holds Python's lock while it lowers, and it brings a second XLA. So a child process does
that work and returns a Program, which JAX compiles and runs here.

~/.cache/lingvo_gshard/programs/NAME-DIGEST.program

DIGEST covers everything that determines a Program: the function that makes it, its arguments, the
code of the library and of the experiment's own classes, and the versions of TensorFlow and JAX. The
folder may be deleted at any time; LINGVO_GSHARD_COMPILATION_CACHE moves it, and `off` disables it.
"""

import atexit
import contextlib
import dataclasses
import enum
import io
import logging
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterable
from multiprocessing import connection, resource_tracker
from typing import Any, TypeVar

from lingvo_gshard.core.hyperparams import BaseParams
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.spmd import own_sources, program
from lingvo_gshard.spmd.program import Program
from xla_spmd.files import child_process, digests
from xla_spmd.runtime import environment, log_lines, main_module, progress, versions

# The child ends after this idle time, which frees its memory (0.7 GiB and more).
_IDLE_SECS = 60.0
_POLL_SECS = 0.5
_PACKAGES = ("jax", "jaxlib", "tensorflow")
_WAITS = "tracing with TensorFlow"  # It is imported first.
_NAME = "lingvo_gshard-tracer"  # The name of the child and of its message file.
_STOPS = (signal.SIGINT, signal.SIGTERM)
_Result = TypeVar("_Result")


class TracingError(RuntimeError):
    """A failure of TensorFlow or JAX in the child; the text holds the child's traceback."""


def traced(function: Callable[..., Program], *args: Any) -> Program:
    """Returns `function(*args)`: a cached Program, or a new one from the child process.

    `function` is defined at the top level of a module or class, and each of `args` is Params, a
    NestedMap, such a function, a value that its repr identifies, such as an enum or a number, or a
    tuple or frozen dataclass of such values. A damaged Program in the cache is made again, with a
    warning.

    Raises ValueError if the function does, if TensorFlow cannot be imported, or if an unguarded
    script defines classes or functions that the child must import. Raises ChildProcessError if the
    child dies, and TracingError for any other failure of the child.
    """
    end_if_child()
    kept = _kept_file(function, args)
    if kept is not None:
        # The digest detects a file that was damaged, for example by a power cut.
        try:
            return program.load(kept, kept.stem)
        except ValueError as error:
            logging.warning("%s It is made again.", error)
        except OSError:  # Usually the file is missing. An unreadable file is rewritten below.
            pass

    with progress.shown(_WAITS):
        made = _child.run(function, args)

    if kept is not None:
        # A full disk or a read-only home only costs the next start some seconds; this one
        # continues.
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            made.save(kept, kept.stem)
        except OSError as error:
            logging.warning("The program %s is not kept: %s", made.name, error)
    return made


def run(function: Callable[..., _Result], *args: Any) -> _Result:
    """Returns `function(*args)` of the child process, for other work that needs TensorFlow.

    The result is not cached. `function` is defined at the top level of a module, and `args` and the
    result can be pickled. Raises the same errors as `traced`.
    """
    end_if_child()
    with progress.shown(_WAITS):
        return _child.run(function, args)


def end() -> None:
    """Ends the child now, to free its memory when no more traces are expected soon.

    A later request starts a new child.
    """
    _child.end()


def end_if_child() -> None:
    """Ends this process if it is the child and is about to repeat an imported script's work."""
    is_child = multiprocessing.current_process().name == _NAME
    main_module.end_if_imported_again(tell=not is_child)  # The parent prints the reason.


def _kept_file(function: Callable[..., Program], args: tuple[Any, ...]) -> pathlib.Path | None:
    """Returns the cache file of this Program; None if the cache is off.

    Also returns None for Params with a value that their text does not identify.
    """
    folder = environment.cache_folder()
    if folder is None:
        return None
    for params in _params_in(args):
        if not all(_is_plain(value) for _, value in params.Leaves()):
            return None

    # This must list everything that may change the program, or an outdated program would run.
    digest = digests.of_json(
        f"{function.__module__}.{function.__qualname__}",
        [_identity(arg) for arg in args],
        _sources(function, args),
        digests.of_library(),
        versions.installed(_PACKAGES),
        os.environ.get("TF_XLA_FLAGS"),
    )
    return folder / "programs" / f"{function.__name__}-{digest[:32]}.program"


def _sources(function: Callable[..., Program], args: tuple[Any, ...]) -> list[str]:
    """Returns the digests of a user's own code in the function and in experiments."""
    values: list[Any] = [function]
    for params in _params_in(args):
        values += [value for _, value in params.Leaves()]
    return own_sources.digests_of(values)


def _identity(arg: Any) -> Any:
    """Returns texts, in lists, that are the same for equal arguments, in every process."""
    match arg:
        case BaseParams():
            return arg.ToText()
        case NestedMap():
            return repr(arg.FlattenItems())
        case types.FunctionType():
            return f"{arg.__module__}.{arg.__qualname__}"
        case _ if parts := _parts(arg):
            return [type(arg).__name__, *map(_identity, parts)]
        case _:
            return repr(arg)


def _parts(arg: Any) -> list[Any]:
    """Returns the items of a tuple or the fields of a dataclass."""
    if isinstance(arg, tuple):
        return list(arg)
    if not dataclasses.is_dataclass(arg) or isinstance(arg, type):
        return []
    return [getattr(arg, field.name) for field in dataclasses.fields(arg)]


def _params_in(arg: Any) -> list[BaseParams]:
    """Returns all Params within an argument."""
    if isinstance(arg, BaseParams):
        return [arg]
    return [params for part in _parts(arg) for params in _params_in(part)]


def _is_plain(value: Any) -> bool:
    """Returns whether Params.ToText shows all of a value. It abbreviates long arrays."""
    match value:
        case None | bool() | int() | float() | str() | enum.Enum() | type() | types.FunctionType():
            return True
        case tuple() | list():
            return all(map(_is_plain, value))
        case dict():
            return all(map(_is_plain, [*value.keys(), *value.values()]))
        case _:
            return False


class _Messages:
    """The child's standard error, in a file that keeps the reason of a crash in C++.

    The libraries' greetings are filtered out.
    """

    def __init__(self, file: io.TextIOWrapper) -> None:
        self._file = file
        self._begun = ""  # An unfinished line.

    def lines(self) -> list[str]:
        """Returns the lines that were completed since the last call."""
        text = self._begun + self._file.read()
        *finished, self._begun = text.split("\n")
        return [line for line in finished if not log_lines.is_greeting(line)]

    def last_lines(self) -> list[str]:
        """Returns all lines since the last call, even an unfinished one, and closes the file."""
        lines = self.lines()
        if self._begun:
            lines.append(self._begun)
        self._file.close()
        return lines


def _show(lines: Iterable[str]) -> None:
    sys.stderr.writelines(f"{line}\n" for line in lines)
    sys.stderr.flush()


class _Child:
    """The child process. It starts with the first request and ends after a long idle time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # One request at a time, as TensorFlow would block others.
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: connection.Connection | None = None
        self._messages: _Messages | None = None
        self._has_main = False  # Whether it has imported the main module.
        self._idle: threading.Timer | None = None

    def run(self, function: Callable[..., _Result], args: tuple[Any, ...]) -> _Result:
        """Returns `function(*args)` of the child; raises the same errors as `traced`."""
        request, needs_main = main_module.pickled((function, args))
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            if needs_main and not self._has_main:
                self.stop()

            try:
                ours = self._connection or self._start(needs_main)
                ours.send_bytes(request)
                made, error, cause = _received(ours)
                assert self._messages is not None
                _show(self._messages.lines())
            except (EOFError, ConnectionError) as end:
                is_unguarded, how = self._end()
                if is_unguarded:
                    raise ValueError(f"{function.__name__}: {main_module.GUARD}") from end
                raise ChildProcessError(f"{function.__name__}: {how}") from end
            except BaseException:
                # For example after Ctrl-C: the answer would be taken for the next request's.
                self.stop()
                raise

            self._idle = threading.Timer(_IDLE_SECS, self._stop_idle)
            self._idle.daemon = True
            self._idle.start()

        if error is not None:
            raise error from cause
        return made

    def end(self) -> None:
        """Ends the child after its answer to the current request."""
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            self.stop()

    def stop(self) -> None:
        """Ends the child at once, whatever it does; it keeps nothing on the disk."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        if self._messages is not None:
            _show(self._messages.last_lines())

        self._process = None
        self._connection = None
        self._messages = None

    def _start(self, has_main: bool) -> connection.Connection:
        """Starts the child, with or without the main module.

        Returns this process's end of the connection to it.
        """
        self._has_main = has_main

        # The child needs the file's name only at its start. Deleting the name then leaves nothing
        # behind, however this process ends.
        with tempfile.NamedTemporaryFile(prefix=f"{_NAME}-") as named:
            file = open(named.name, encoding="utf-8", errors="replace", newline="\n")
            self._messages = _Messages(file)
            return self._start_with(named.name)

    def _start_with(self, messages: str) -> connection.Connection:
        """Starts the child, and returns once it has opened its message file."""
        # Spawn rather than fork: this process has threads, and JAX may hold a device.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, messages), name=_NAME, daemon=True
        )

        # Ctrl-C and a scheduler's SIGTERM reach the whole group, but the parent decides when to
        # stop: the child inherits the signals blocked here. The tracker must start earlier, because
        # its start would unblock them.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        main = contextlib.nullcontext() if self._has_main else main_module.hidden()
        try:
            with main:
                self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        # If only the child has the other end, its death ends the connection.
        theirs.close()
        _received(self._connection)
        return self._connection

    def _stop_idle(self) -> None:
        # A request that arrived in the meantime holds the lock, and starts a new timer.
        if self._lock.acquire(blocking=False):
            self.stop()
            self._lock.release()

    def _end(self) -> tuple[bool, str]:
        """Returns whether the child met an unguarded script, and how it ended, with its last line.

        Shows all earlier lines of the child.
        """
        assert self._process is not None and self._messages is not None
        self._process.join()
        status = self._process.exitcode or 0
        lines = self._messages.last_lines()
        self._messages = None
        self.stop()

        if status == -signal.SIGKILL:
            last = "; is there enough memory?"
        elif any(line.strip() for line in lines):
            while not lines[-1].strip():
                lines.pop()
            last = f": {lines.pop().strip()}"
        else:  # Before it serves, it writes to this process's standard error.
            last = "; any output of it is shown above."
        _show(lines)

        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        died = f"the process that traces it with TensorFlow has died {how}{last}"
        return status == main_module.UNGUARDED, died


def _received(ours: connection.Connection) -> Any:
    """Waits for the child's next message; raises EOFError if the child has ended."""
    # An endless wait would miss a signal that arrived just before it.
    while not ours.poll(_POLL_SECS):
        pass
    return ours.recv()


_child = _Child()
# Nobody waits for the child any longer, whatever it does.
atexit.register(_child.stop)


def _serve(requests: connection.Connection, messages: str) -> None:
    """Answers requests in the child, each with a result or an error, until the parent ends."""
    child_process.end_with_parent()

    # A crash in C++ writes its reason to standard error's descriptor.
    with open(messages, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    requests.send("ready")

    # Must come before anything here starts JAX or imports TensorFlow.
    environment.prepare_tracing()
    while True:
        function, args = requests.recv()
        try:
            _import_tensorflow()
            requests.send((function(*args), None, None))
        except (ValueError, OSError, MemoryError) as error:
            # With --verbosity=1 the traceback is shown, which the pickled error itself lacks.
            requests.send((None, error, TracingError(traceback.format_exc())))
        except Exception:
            # The parent may be unable to read another error.
            requests.send((None, TracingError(traceback.format_exc()), None))


def _import_tensorflow() -> None:
    """Imports TensorFlow. Raises ValueError if that fails."""
    try:
        with environment.without_keras():
            import tensorflow  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"Tracing needs TensorFlow, which cannot be imported here ({error}); "
            "`pip install lingvo_gshard`, or `make setup` in a checkout, installs it."
        ) from None
