"""What the binaries share: they parse flags, prepare the environment, and only then import.

TensorFlow and JAX read the environment while they are imported. So a binary defines its flags,
calls `run`, and names in `load` the modules that do its work.
"""

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

from lingvo_gshard.spmd import environment

_MISSING = re.compile(r"flag --(\w+)=None: Flag --\w+ must have a value other than None.")


def run(
    program: str,
    main: Callable[[list[str]], None],
    num_devices: Callable[[], int | None] = lambda: None,
) -> None:
    """Parses the flags, prepares `num_devices()` virtual CPU devices, and runs `main`.

    A user's mistake (ValueError), a failure of the machine (OSError) and a loss that is not finite
    end the process with one line and exit status 1; --verbosity=1 shows the traceback. If the
    reader of standard output goes away or the user presses Ctrl-C, the exit status is the one that
    a shell gives to SIGPIPE or SIGINT.
    """

    def guarded(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected arguments {argv[1:]}; see --help.")
            devices = num_devices()
            environment.prepare(None if devices is None else max(1, devices))
            if not logging.level_debug():
                logging.set_verbosity(logging.WARNING)  # Hides the libraries' news.
            main(argv)
        except BrokenPipeError:
            # What is still buffered has no reader.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        except (ValueError, OSError, FloatingPointError) as error:
            if logging.level_debug():
                raise
            sys.exit(f"{program}: {error}")
        except KeyboardInterrupt:
            print(f"{program}: interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    app.run(guarded, flags_parser=lambda argv: _parse(program, argv))


def load(module: str) -> Any:
    """Imports a module by name, without the greetings that TensorFlow and XLA print."""
    with environment.quiet_stderr():
        return importlib.import_module(module)


def _parse(program: str, argv: list[str]) -> list[str]:
    """Parses the flags; --help exits with status 0, a wrong flag with 1 and one line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        missing = _MISSING.fullmatch(str(error))
        reason = f"--{missing[1]} is missing" if missing else str(error).rstrip(".")
        sys.exit(f"{program}: {reason}; see --help.")
    except SystemExit:  # absl exits with status 1 after --help.
        sys.exit(0)
