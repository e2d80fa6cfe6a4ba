"""What the binaries share: the environment before anything loads, and mistakes told in one line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from absl import app, logging

from lingvo_gshard.spmd import environment


def run(name: str, main: Callable[[list[str]], None], num_devices: Callable[[], int]) -> None:
    """Parses the flags and runs `main` on `num_devices()` virtual CPU devices.

    A ValueError, which is a user's mistake, an OSError, which is the machine's, or a loss that is
    no number ends the process with one line and exit status 1; with --verbosity=1 the traceback
    is shown. Ctrl-C ends it with one line and the status that a shell gives it, 130.
    """

    def guarded(argv: list[str]) -> None:
        environment.prepare(max(1, num_devices()))
        if not logging.level_debug():
            logging.set_verbosity(logging.WARNING)  # The libraries' news; progress is printed.
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected arguments {argv[1:]}; see --help")
            main(argv)
        except (ValueError, OSError, FloatingPointError) as error:
            if logging.level_debug():
                raise
            sys.exit(f"{name}: {error}")
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    app.run(guarded)
