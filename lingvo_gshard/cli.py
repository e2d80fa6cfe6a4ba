"""The common part of all binaries: flags are checked, devices prepared, and mistakes reported.

A binary checks what it can before it imports JAX, which takes a second; so the modules that compute
are imported in its main(). No binary imports TensorFlow: spmd/tracer.py has a process for that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import TYPE_CHECKING

from absl import flags

from xla_spmd.runtime import command_line

if TYPE_CHECKING:
    from lingvo_gshard.spmd.process_flags import Processes

# The flags of several processes, which some programs refuse.
OF_PROCESSES = (
    "cluster",
    "coordinator",
    "coordinator_port",
    "join_timeout_secs",
    "num_processes",
    "process_id",
)


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
        "auto: ask Slurm, Open MPI, Kubernetes or Cloud TPU.",
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


@functools.cache
def define_imports() -> None:
    """Defines the flag of a program that looks experiments up."""
    flags.DEFINE_multi_string(
        "import",
        [],
        "A module of yours that registers experiments, in the current folder or installed; "
        "repeatable.",
    )


def _import_modules() -> None:
    """Imports the modules of --import, if the program has it."""
    names = flags.FLAGS["import"].value if "import" in flags.FLAGS else []
    is_bundle = importlib.util.find_spec("lingvo_gshard.registry") is None
    if names and not is_bundle:
        from lingvo_gshard import registry

        registry.import_modules(names)


# Runs a program as command_line.run does, once the modules of --import are imported.
run = functools.partial(command_line.run, at_start=_import_modules)


def start_devices(model: str, partitions: int | None = None) -> tuple[int, str]:
    """Starts JAX; returns the number of partitions and a description of the devices.

    `partitions` replaces --num_partitions. Raises ValueError if the platform does not have so many
    devices, or for one of the paper's models on a CPU without --platform=cpu.
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

    devices.prepare(flags.FLAGS.platform, partitions, num_processes)


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
    from lingvo_gshard.spmd.process_flags import Processes

    # One process, unless flags speak of others.
    values = flags.FLAGS
    if values.cluster == "none" and values.num_processes == 1:
        has_others = values.process_id or values.coordinator
        if has_others and not values["num_processes"].present:
            raise ValueError("--coordinator and --process_id need --num_processes.")
        if values.process_id:
            raise ValueError(f"--process_id={values.process_id}: expected 0 for --num_processes=1.")
        return None

    timeout_secs = values.join_timeout_secs
    if values.cluster == "none":
        if values.coordinator is None:
            raise ValueError(
                "--num_processes needs --coordinator=HOST:PORT, the address of process 0."
            )
        return Processes(
            values.coordinator, values.num_processes, values.process_id, timeout_secs=timeout_secs
        )

    # The cluster knows all of it, and may have started this process alone.
    if values.coordinator is not None or values.num_processes != 1 or values.process_id:
        raise ValueError("--cluster=auto: omit --coordinator, --num_processes, --process_id.")
    from lingvo_gshard.spmd import processes as spmd_processes

    detected = spmd_processes.detected(values.coordinator_port, timeout_secs)
    return detected if detected.num_processes > 1 else None
