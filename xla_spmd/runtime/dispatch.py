"""One command for several programs: it starts the module of the program that is named.

It imports the standard library alone, so that a missing package is one line, whichever it is.
"""

import difflib
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from xla_spmd.runtime import versions

typed = ""  # The command that the user typed, such as `gshard train`; empty for `python -m`.


def run(
    command: str,
    programs: Mapping[str, str],
    clauses: Mapping[str, str],
    example: str,
    version: str = "",
) -> None:
    """Runs the module that the first argument names, and passes the other arguments to it.

    `programs` maps each name to its module, and `clauses` to its description. Without an argument,
    and with --help, prints the names and descriptions, and how to start the `example`. With
    --version, prints the `version`. An unknown name ends the process with one line and exit status
    1.
    """
    name, *arguments = sys.argv[1:] or [""]
    if name == "help" and arguments:  # For example `gshard help train`.
        name = arguments[0]
        sys.argv[1:] = [name, "--help"]
    if name in ("", "-h", "-help", "--help", "help"):
        show(_listed(command, programs, clauses, example))
        return
    if version and name in ("-V", "-version", "--version", "version"):
        print(f"{command} {version}")
        return
    if name not in programs:
        sys.exit(f"{command}: {_unknown(command, name, list(programs), example)}")

    # The program sees only its own flags.
    global typed
    typed = f"{command} {name}"
    del sys.argv[1]
    try:
        runpy.run_module(programs[name], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        # This handles imports at the program's top; command_line.py reports later ones.
        advice = versions.advice(error)
        if advice is None:
            raise
        sys.exit(f"{command} {name}: {advice}")


def _listed(
    command: str, programs: Mapping[str, str], clauses: Mapping[str, str], example: str
) -> str:
    """Returns the names of all programs, each with a clause."""
    lines = [f"usage: {command} PROGRAM [FLAGS]", ""]
    width = max(map(len, programs))
    for name in programs:
        lines.append(f"  {name.ljust(width)}  {clauses[name]}")
    return "\n".join(
        [
            *lines,
            "",
            f"`{command} PROGRAM --help` lists a program's flags.",
            f"`python -m {programs[example]}` is `{command} {example}`, and so on.",
        ]
    )


def _unknown(command: str, name: str, names: Sequence[str], example: str) -> str:
    """Returns the error message for an unknown program name, with the nearest known name."""
    if name.startswith("-"):
        return f"{name}: expected a program first, such as `{command} {example} {name}`."
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"no program {name!r}; expected one of {', '.join(names)}.{hint}"


def show(text: str) -> None:
    """Prints a text, of which the reader may read only a part, for example `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        exit_unread()


def exit_unread() -> NoReturn:
    """Exits with the shell's status for SIGPIPE, because nobody reads standard output now."""
    # Python writes buffered text when it exits, but nobody reads it any more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
