"""What the binaries share: they parse and check flags, prepare the devices, and report mistakes.

A binary checks what it can before it imports JAX, which takes a second; so the modules that compute
are imported in its main(). No binary imports TensorFlow: spmd/tracer.py has a process for that.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from absl import app, flags, logging

from lingvo_gshard.spmd import environment, versions

if TYPE_CHECKING:
    from lingvo_gshard.spmd.processes import Processes

_NO_MEMORY = "RESOURCE_EXHAUSTED: "  # XLA's errors begin with a status code.
# absl's messages about a wrong flag, and plain ones in their place.
_PLAIN = {
    r"flag --(\w+)=None: Flag .* must have a value other than None": r"--\1 is missing",
    r"flag --(\w+)=.*: (.*) is not a positive integer": r"--\1 must be 1 or more, got \2",
    r"Unknown command line flag 'serve'.*": "--serve: serving is a program, lingvo_gshard.serve",
    r"Unknown command line flag 'export'.*": (
        "--export: exporting is a program, lingvo_gshard.export_bundle"
    ),
}


@functools.cache  # Tests import several binaries into one process.
def define_devices() -> None:
    """Defines the flags of a binary that computes: on which devices, and in how many processes."""
    flags.DEFINE_enum(
        "platform",
        "auto",
        ["auto", "cpu", "cuda", "tpu"],
        "What to compute on; auto: accelerators if there are any, else virtual CPU devices.",
    )
    flags.DEFINE_integer(
        "num_partitions",
        None,
        "Devices to split the model over: by default all accelerators, or one CPU device.",
        lower_bound=1,
    )

    # A cluster tells the processes of each other, or the next flags do.
    flags.DEFINE_enum(
        "cluster",
        "none",
        ["auto", "none"],
        "auto: what Slurm, Open MPI, Kubernetes or Cloud TPU say.",
    )
    flags.DEFINE_integer(
        "coordinator_port",
        None,
        "The port of process 0, with --cluster=auto.",
        lower_bound=1,
        upper_bound=65535,
    )
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, if several.")
    flags.DEFINE_integer("num_processes", 1, "Processes that work together.", lower_bound=1)
    flags.DEFINE_integer("process_id", 0, "This process's number among them.")
    flags.DEFINE_integer(
        "join_timeout_secs",
        300,
        "Seconds to wait for the other processes at the start.",
        lower_bound=1,
    )


def start_devices(model: str, partitions: int | None = None) -> tuple[int, str]:
    """Starts JAX; returns the number of partitions and a description of the devices.

    `partitions` replaces --num_partitions. Raises ValueError as devices.start and check_model.
    """
    from lingvo_gshard.spmd import devices

    # With several processes, `joined` has done it, before JAX could start.
    if processes() is None:
        _prepare_devices(partitions)

    started = devices.start(partitions or flags.FLAGS.num_partitions)
    devices.check_model(model, flags.FLAGS.platform)
    return started


def _prepare_devices(partitions: int | None) -> None:
    """Prepares the platform, and this process's part of `partitions`, or of --num_partitions."""
    from lingvo_gshard.spmd import devices

    # Each process has as many devices as the others.
    several = processes()
    num_processes = several.num_processes if several else 1
    what = "a bundle of" if partitions else "--num_partitions of"
    partitions = partitions or flags.FLAGS.num_partitions or num_processes
    if partitions % num_processes:
        raise ValueError(
            f"{num_processes} processes need {what} {num_processes} or a multiple, got "
            f"{partitions}."
        )

    platform = flags.FLAGS.platform
    if platform == "auto":  # It becomes None if JAX_PLATFORMS decides.
        platform = devices.find()
    environment.prepare(partitions // num_processes, platform)


def joined(partitions: int | None = None) -> contextlib.AbstractContextManager[None]:
    """Prepares the devices and joins the other processes, if there are any."""
    several = processes()
    if several is None:
        return contextlib.nullcontext()

    from lingvo_gshard.spmd import processes as spmd_processes

    _prepare_devices(partitions)
    return spmd_processes.joined(several)


@functools.cache
def processes() -> Processes | None:
    """Returns the processes that work together; None if this one works alone.

    Raises ValueError for flags that do not go together, and as spmd.processes.detected.
    """
    # One process, unless flags speak of others.
    values = flags.FLAGS
    if values.cluster == "none" and values.num_processes == 1:
        has_others = values.process_id or values.coordinator
        if has_others and not values["num_processes"].present:
            raise ValueError("--coordinator and --process_id need --num_processes.")
        if values.process_id:
            raise ValueError(f"--process_id={values.process_id}: expected 0 for --num_processes=1.")
        return None

    from lingvo_gshard.spmd import processes as spmd_processes

    # The cluster knows all of it, and may have started this process alone.
    timeout_secs = values.join_timeout_secs
    if values.cluster == "auto":
        if values.coordinator is not None or values.num_processes != 1 or values.process_id:
            raise ValueError("--cluster=auto: omit --coordinator, --num_processes, --process_id.")
        detected = spmd_processes.detected(values.coordinator_port, timeout_secs)
        return detected if detected.num_processes > 1 else None

    if values.coordinator is None:
        raise ValueError("--num_processes needs --coordinator=HOST:PORT, the address of process 0.")
    return spmd_processes.Processes(
        values.coordinator, values.num_processes, values.process_id, timeout_secs=timeout_secs
    )


def run(program: str, main: Callable[[], None]) -> None:
    """Parses the flags, prepares the environment, and runs `main`.

    A user's mistake (ValueError), a failure of the machine (OSError), a lack of memory, a package
    that is not installed and a loss that is not finite end the process with one line and exit
    status 1; --verbosity=1 shows the traceback. If the reader of standard output goes away or the
    user presses Ctrl-C, the exit status is the one that a shell gives to SIGPIPE or SIGINT.

    Paths and text are in UTF-8, whatever the locale is.
    """
    _use_utf8()

    def guarded(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected arguments {argv[1:]}; see --help.")
            # Before `main` imports what reads the environment when it is loaded.
            environment.prepare()
            if not logging.level_debug():
                logging.set_verbosity(logging.WARNING)  # Hides the libraries' news.
            main()

        except BrokenPipeError:
            _exit_unread()

        except ModuleNotFoundError as error:
            # The wheel by itself has not the packages of all programs.
            advice = versions.advice(error)
            if logging.level_debug() or advice is None:
                raise
            sys.exit(f"{program}: {advice}")

        except (ValueError, OSError, FloatingPointError, MemoryError, RuntimeError) as error:
            # A RuntimeError is a mistake of ours, unless XLA lacks memory.
            is_known = not isinstance(error, RuntimeError) or str(error).startswith(_NO_MEMORY)
            if logging.level_debug() or not is_known:
                raise
            reason = "out of memory" if isinstance(error, MemoryError) else repr(error)
            if isinstance(error, FileExistsError):  # All of our writing replaces files.
                sys.exit(f"{program}: {error.filename} is a file; a folder is expected")
            sys.exit(f"{program}: {str(error) or reason}")

        except KeyboardInterrupt:
            print(f"{program}: interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)

    app.run(guarded, flags_parser=lambda argv: _parse(program, argv))


def _use_utf8() -> None:
    """Starts the program again in Python's UTF-8 mode if the locale has another encoding.

    Otherwise what it records, such as paths, would mean something else in another locale, and with
    ASCII alone it could not print or write all of it.
    """
    can_start_again = not sys.flags.utf8_mode and os.environ.get("PYTHONUTF8") != "1"
    if sys.getfilesystemencoding() != "utf-8" and can_start_again:
        os.environ["PYTHONUTF8"] = "1"  # For processes that this one starts, too.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])

    # The name of a file may be no UTF-8, and standard output's encoding is the user's choice.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _parse(program: str, argv: list[str]) -> list[str]:
    """Parses the flags; --help exits with status 0, a wrong flag with 1 and one line."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        reason = str(error).rstrip(".")
        for absls, plain in _PLAIN.items():
            reason = re.sub(absls, plain, reason)
        # absl has a line for each flag.
        reason = ", ".join(line.rstrip(".") for line in reason.splitlines())
        sys.exit(f"{program}: {reason}; see --help.")
    except SystemExit:  # absl exits with status 1 after --help.
        sys.exit(0)
    except BrokenPipeError:  # As `--help | head` reads no further.
        _exit_unread()


def _exit_unread() -> NoReturn:
    """Exits with the shell's status for SIGPIPE, as the reader of standard output is gone."""
    # Python writes what is still buffered when it exits, and nobody reads it any more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)
