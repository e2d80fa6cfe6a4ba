"""What the binaries share: they parse flags, prepare the environment, and only then import.

TensorFlow and JAX read the environment while they are imported. So a binary defines its flags,
calls `run`, and names in `load` the modules that do its work.
"""

import dataclasses
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

from lingvo_gshard.spmd import environment

_PLATFORMS = ("auto", "cpu", "cuda", "tpu")
_MISSING = re.compile(r"flag --(\w+)=None: Flag --\w+ must have a value other than None.")


@dataclasses.dataclass(frozen=True)
class DeviceFlags:
    """The flags of a binary that computes: on which devices, and on how many of them."""

    platform: flags.FlagHolder[str]
    num_partitions: flags.FlagHolder[int | None]

    def start(self, model: str) -> tuple[int, str]:
        """Starts JAX; returns the number of partitions and a description of the devices.

        Raises ValueError as devices.start and devices.check_model.
        """
        devices = load("lingvo_gshard.spmd.devices")
        started = devices.start(self.num_partitions.value)
        devices.check_model(model, self.platform.value)
        return started


def device_flags() -> DeviceFlags:
    """Defines --platform and --num_partitions."""
    return DeviceFlags(
        flags.DEFINE_enum(
            "platform",
            "auto",
            _PLATFORMS,
            "What to compute on; auto: accelerators if there are any, else virtual CPU devices.",
        ),
        flags.DEFINE_integer(
            "num_partitions",
            None,
            "Devices to split the model over: by default all accelerators, or one CPU device.",
            lower_bound=1,
        ),
    )


def run(
    program: str,
    main: Callable[[list[str]], None],
    num_devices: Callable[[], int | None] = lambda: None,
) -> None:
    """Parses the flags, prepares the devices, and runs `main`.

    `num_devices()` is the number of devices if they are virtual ones of the CPU; None if the binary
    needs no devices. A user's mistake (ValueError), a failure of the machine (OSError) and a loss
    that is not finite end the process with one line and exit status 1; --verbosity=1 shows the
    traceback. If the reader of standard output goes away or the user presses Ctrl-C, the exit
    status is the one that a shell gives to SIGPIPE or SIGINT.
    """

    def guarded(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected arguments {argv[1:]}; see --help.")
            environment.prepare()  # Flags may need JAX to be understood.
            devices = num_devices()
            environment.prepare(devices, None if devices is None else _platform())
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


def _platform() -> str | None:
    """What --platform asks for; None for what JAX_PLATFORMS says, or `cpu`."""
    asked = flags.FLAGS.platform if "platform" in flags.FLAGS else None
    return load("lingvo_gshard.spmd.devices").find() if asked == "auto" else asked


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
