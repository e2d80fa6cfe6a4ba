"""The frame of every program: parses flags, prepares the environment, and reports mistakes."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

from absl import flags, logging

from xla_spmd.files import storage
from xla_spmd.runtime import dispatch, environment, log_lines, usage, versions

_NO_SPACE = os.strerror(errno.ENOSPC)
_NO_MEMORY = "RESOURCE_EXHAUSTED: "  # XLA's errors begin with a status code.
# absl's messages about a wrong flag, and plain replacements.
_PLAIN = {
    r"flag --(\w+)=None: Flag .* must have a value other than None": r"--\1 is missing",
    r"flag --(\w+)=.*: (.*) is not a positive integer": r"--\1 must be 1 or more, got \2",
    r"flag --(\w+)=.*: (.*) is not a non-negative number": r"--\1 must be 0 or more, got \2",
    r"flag --(\w+)=.*: (.*) is not (a number|an integer) in the range \[(.*), (.*)\]": (
        r"--\1 must be \4 to \5, got \2"
    ),
    r"flag --(\w+)=(.*): invalid literal for int\(\) .*": r"--\1=\2: expected a whole number",
    r"flag --(\w+)=(.*): could not convert string to float: .*": r"--\1=\2: expected a number",
    r"flag --(.*): value should be one of <(.*)>": r"--\1: expected one of \2",
    r"flag (--.*): \('Non-boolean argument .*": r"\1: expected true or false",
    r"flag (--.*: expected .*)": r"\1",
    r"Unknown command line flag 'serve'.*": "--serve: serving is a program, gshard serve",
    r"Unknown command line flag 'export'.*": ("--export: exporting is a program, gshard export"),
    r"Unknown command line flag '(.*)'": r"--\1 is not a flag of this program",
}


def run(
    program: str,
    main: Callable[..., None],
    arguments: Sequence[str] = (),
    unused: Collection[str] = (),
    at_start: Callable[[], None] | None = None,
) -> None:
    """Parses the flags, prepares the environment, and runs `main`, after `at_start`.

    `main` gets the positional arguments as strings. `arguments` names them; if the last name ends
    with `...`, it stands for any number of them. `unused` are flags that several programs share but
    this one refuses: its help omits them.

    A user's mistake (ValueError), a machine failure (OSError), a lack of memory, a missing package
    or an infinite loss ends the process with one line and exit status 1; --verbosity=1 shows the
    traceback. If standard output is closed or the user presses Ctrl-C, the exit status is the
    shell's status for SIGPIPE or SIGINT.

    Paths and text are UTF-8 in every locale.
    """
    _use_utf8()
    program = dispatch.typed or program
    if usage.asks_for_help(sys.argv):
        dispatch.show(usage.help_text(program, arguments, unused))
        sys.exit(0)

    words = _parse(program, sys.argv)[1:]
    log_lines.write_plainly()
    faulthandler.enable()  # A crash in C++ shows where Python was.
    with _in_one_line(program):
        usage.check_words(words, arguments)
        usage.check_not_empty()
        usage.expand_homes()
        # Must precede the imports in `main`, which read the environment when they are loaded.
        environment.prepare()
        if not logging.level_debug():
            logging.set_verbosity(logging.WARNING)  # Hides the libraries' info lines.
        if at_start is not None:
            at_start()
        main(*map(storage.expanded, words))


@contextlib.contextmanager
def _in_one_line(program: str) -> Iterator[None]:
    """Prints a mistake in one line and ends the process; see `run` for the exit statuses."""
    try:
        yield

    except BrokenPipeError:
        dispatch.exit_unread()

    except ModuleNotFoundError as error:
        # The wheel alone lacks the packages of some programs.
        advice = versions.advice(error)
        if logging.level_debug() or advice is None:
            raise
        sys.exit(f"{program}: {advice}")

    except (ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as error:
        # A RuntimeError is a bug of ours, unless XLA lacks memory.
        is_known = not isinstance(error, RuntimeError) or str(error).startswith(_NO_MEMORY)
        if logging.level_debug() or not is_known:
            raise
        reason = "out of memory" if isinstance(error, MemoryError) else repr(error)
        sys.exit(f"{program}: {_plain(error) or reason}")

    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _plain(error: Exception) -> str:
    """Returns an error's message; the kernel's errors first name the file."""
    if _NO_SPACE in str(error):  # Also the errors of libraries in C++.
        named = re.search(r"/[^\s'\"\];]+", str(error))
        return f"{named[0] if named else 'the disk'}: no space left on the device"
    if not isinstance(error, OSError) or error.errno is None or error.filename is None:
        return str(error)

    # Our writers replace files and make folders, so this is a file in a folder's place.
    path = pathlib.Path(os.fsdecode(error.filename))
    if isinstance(error, FileExistsError | NotADirectoryError):
        file = next((part for part in (path, *path.parents) if part.is_file()), path)
        return f"{file} is a file; a folder is expected"
    return f"{path}: {os.strerror(error.errno).lower()}"


def _use_utf8() -> None:
    """Restarts the program in Python's UTF-8 mode if the locale has a different encoding.

    Without it, recorded text such as paths would be misread in a different locale, and an ASCII
    locale could not print or write all of it.
    """
    can_start_again = not sys.flags.utf8_mode and os.environ.get("PYTHONUTF8") != "1"
    if sys.getfilesystemencoding() != "utf-8" and can_start_again:
        os.environ["PYTHONUTF8"] = "1"  # Child processes inherit it.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])

    # A file name may not be valid UTF-8, and the user chooses standard output's encoding.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parse(program: str, argv: list[str]) -> list[str]:
    """Parses the flags; a wrong flag ends the process with status 1 and one line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        hint = usage.similar_flags(error) or usage.setting_hint(error, argv)
        reason = hint or str(error).rstrip(".")
        for absls, plain in _PLAIN.items():
            reason = re.sub(absls, plain, reason)
        # absl has a line for each flag.
        reason = ", ".join(line.rstrip(".") for line in reason.splitlines())
        sys.exit(f"{program}: {reason}; see --help.")
